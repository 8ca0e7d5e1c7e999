"""Only a mask whose values can be no others is folded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import prepare
from autopar.trace import trace


class Masked(nn.Module):
    """Attention under a mask of zeros: an input, a frozen parameter, a buffer that forward counts up, or a constant."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(8, 24)
        if kind == "parameter":
            self.mask = nn.Parameter(torch.zeros(6, 6), requires_grad=False)
        elif kind in ("buffer", "updated"):
            self.register_buffer("mask", torch.zeros(6, 6))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.kind == "updated":
            self.mask.add_(1.0)
        mask = mask if mask is not None else self.mask
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).mean()


@pytest.mark.parametrize(
    ("kind", "folded"), [("input", False), ("parameter", False), ("updated", False), ("buffer", True)]
)
def test_what_a_mask_of_zeros_may_become(kind: str, folded: bool) -> None:
    model, example = Masked(kind), {"x": torch.randn(2, 6, 8)}
    if kind == "input":
        example["mask"] = torch.zeros(1, 1, 6, 6)
    graph = prepare(trace(model, example)).graph_module.graph
    (attention,) = (n for n in graph.nodes if "scaled_dot_product" in n.name)
    assert (attention.args[3] is None) == folded
