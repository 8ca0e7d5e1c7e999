"""Field cases tr-05, tr-08 and bf-03: control flow on values is refused by place; modules, buffers and constants that
several layers use are cut to stages and ranks right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.build import build
from autopar.errors import UnsupportedModelError
from autopar.mesh import Degrees
from autopar.passes import apply, prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from autopar.verify import verify_plans
from tests.models import BUILDERS, default_batch
from tests.plans import on_every_axis

DIM, VOCAB = 16, 64


class Block(nn.Module):
    """Calls one norm twice, is handed a buffer of the root, and makes a constant tensor in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, table: Tensor, shared: nn.Module) -> Tensor:
        h = self.up(self.norm(x) + table[: x.shape[1]])
        cap = torch.tensor(2.0, dtype=x.dtype)
        y: Tensor = x + self.norm(self.down(torch.tanh(h / cap) * cap))
        return y + shared(x)


class Shared(nn.Module):
    """A root buffer for every layer, one small module that all layers call, and a scale made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.gate = nn.Linear(DIM, DIM, bias=False)
        self.register_buffer("table", torch.randn(32, DIM), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x * torch.tensor(DIM**0.5, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, self.table, self.gate)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def shared() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Shared().double(), default_batch()


@pytest.mark.distributed
def test_tr_08_bf_03_shared_parts_and_constants_train_as_one_process() -> None:
    model, batch = shared()
    traced = prepare(trace(model, batch))
    failed = [r.text() for r in verify_plans(shared, on_every_axis(traced)) if not r.passed]
    assert not failed, "\n\n".join(failed)


def test_bf_03_every_stage_holds_its_own_constants() -> None:
    traced = prepare(trace(*shared()))
    halves = (("layers.0", "layers.1"), ("layers.2", "layers.3"))
    plan = Plan(degrees=Degrees(pp=2), global_batch=8, seq_len=16, micro_batch=2, stages=halves, precision="fp64")
    for stage in apply(traced, plan):
        held = dict(stage.graph_module.named_buffers())
        assert "table" in stage.buffers.values()
        assert [float(t) for n, t in held.items() if t.dim() == 0].count(2.0) == 2  # a cap for each of its layers
        assert not any(spec.endswith("_constants") for spec in stage.receives)


def _logits_of_meta(family: str, degrees: Degrees) -> float:
    """Largest difference of a meta-built model's loss, loaded with the normal one's weights."""
    normal = BUILDERS[family]()
    with torch.device("meta"):
        model = BUILDERS[family]()
    batch = default_batch()
    traced = prepare(trace(model, batch))
    layers = tuple(s.path for s in traced.layers)
    half = len(layers) // 2
    stages = (layers,) if degrees.pp == 1 else (layers[:half], layers[half:])
    plan = Plan(degrees=degrees, global_batch=8, seq_len=16, micro_batch=4, stages=stages, precision="fp64")
    pm: Any = build(model, traced, plan)
    computed = [n for n, _ in normal.named_buffers()]
    pm.load_state_dict({n: t for n, t in normal.state_dict().items() if n not in computed})
    call = batch if family == "bert" else {**batch, "use_cache": False}
    return abs(float(pm.step(batch)) - float(normal(**call).loss))


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("degrees", [Degrees(tp=2), Degrees(pp=2)])
def test_bf_01_meta_buffers_are_right_on_every_rank(family: str, degrees: Degrees) -> None:
    assert max(run_ranks(2, _logits_of_meta, family, degrees)) < 1e-6


class Branching(Block):
    def forward(self, x: Tensor, table: Tensor, shared: nn.Module) -> Tensor:
        h = super().forward(x, table, shared)
        if h.abs().mean() > 1:
            h = h / 2
        return h


def _item(h: Tensor) -> Tensor:
    return h[:, : int(h.abs().max().item()) + 1]


def _nonzero(h: Tensor) -> Tensor:
    return h * len(h.nonzero())


class Reads(Block):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, table: Tensor, shared: nn.Module) -> Tensor:
        return self.function(super().forward(x, table, shared))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Branching, lambda: Reads(_item), lambda: Reads(_nonzero)])
def test_tr_05_control_flow_on_values_names_block_and_line(make: Any) -> None:
    model, batch = shared()
    model.layers[2] = make().double()
    with pytest.raises(UnsupportedModelError, match=r"^layers\.2: cannot be captured.*test_tr_08_shared_parts\.py:\d+"):
        trace(model, batch)
