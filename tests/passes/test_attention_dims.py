"""Attention over joined or missing heads becomes one of four dims, with the same values, that tp can split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model.strategy_table import strategy_table
from autopar.passes import prepare
from autopar.placement import Shard
from autopar.trace import trace

HEADS, WIDTH = 4, 8
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _over(shape: Callable[[int, int], tuple[int, ...]]) -> Attend:
    """Attention with [batch, heads, seq, width] viewed as `shape(batch, seq)`."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, _, seq, _ = q.shape
        return _attend(*(t.reshape(shape(batch, seq)) for t in (q, k, v))).view(q.shape)

    return attend


LAYOUTS: dict[str, tuple[Attend, bool]] = {
    "rows and heads joined": (_over(lambda b, s: (b * HEADS, s, WIDTH)), True),
    "rows and heads joined as heads": (_over(lambda b, s: (1, b * HEADS, s, WIDTH)), True),
    "groups of heads": (_over(lambda b, s: (b, 2, 2, s, WIDTH)), True),
    "four dims": (_attend, True),
    "one head, three dims": (lambda q, k, v: _attend(q.sum(1), k.sum(1), v.sum(1))[:, None], False),
}


class Net(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_stay_and_heads_can_be_split(name: str) -> None:
    attend, splits = LAYOUTS[name]
    model = Net(attend).double()
    traced = prepare(trace(model, torch.zeros(4, 6, HEADS * WIDTH, dtype=torch.float64)))
    (attention,) = (n for n in traced.graph_module.graph.nodes if "scaled_dot_product" in str(n.target))
    assert len(attention.meta["shape"]) == 4
    assert attention.meta["shape"][0] == traced.batch
    assert (Shard(1) in [s.output for s in strategy_table(traced, 2, 6)[attention]]) == splits
    x = torch.randn(3, 5, HEADS * WIDTH, dtype=torch.float64)
    torch.testing.assert_close(traced.graph_module(x)[0], model(x), rtol=0, atol=1e-14)
