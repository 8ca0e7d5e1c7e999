"""A model that cannot be planned is told its cause, not a symptom of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import search_captured
from autopar.cost_model.candidates import ModelLimits, enumerate_partitions
from autopar.cost_model.model_checks import check_model, check_pinned_dims, pins_without_effect
from autopar.errors import AutoparError, InfeasiblePlanError, SpecError
from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.specs import Pins, TrainSpec
from autopar.trace import trace

ROWS = 64


class Net(nn.Module):
    """Two layers over token and learned positions; `loss` says what forward returns."""

    def __init__(self, *, loss: str = "mean", depth: int = 2, layers: bool = True) -> None:
        super().__init__()
        self.loss, self.layers = loss, layers
        self.tokens, self.positions = nn.Embedding(16, 8), nn.Embedding(ROWS, 8)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids: Tensor) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)[None])
        for block in self.blocks if self.layers else ():
            x = x + block(x)
        return {"mean": x.mean(), "vector": x.mean(-1), "states": {"states": x}}[self.loss]


def captured(**options: Any) -> TracedModel:
    return trace(Net(**options), {"ids": torch.zeros(2, 12, dtype=torch.long)})


def test_a_model_with_a_loss_weights_and_layers_passes_up_to_its_last_position() -> None:
    check_model(captured(), ROWS)
    with pytest.raises(AutoparError, match=f"positions.weight has {ROWS} rows, the sequence {ROWS + 1} tokens"):
        check_model(captured(), ROWS + 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": "vector"}, r"no loss, a floating-point scalar: it returns .*of shape \(batch, seq\)"),
        ({"loss": "states"}, r"no loss, .*states of shape \(batch, seq, 8\)"),
        ({"loss": "vector", "layers": False}, "no loss"),
        ({"layers": False}, "no layers were found. A layer is"),
    ],
)
def test_the_cause_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(AutoparError, match=says):
        check_model(captured(**options), 8)


def test_a_missing_loss_is_told_before_a_length_that_is_fixed() -> None:
    traced = trace(nn.Linear(4, 4), {"input": torch.zeros(2, 4)})
    assert traced.seq_range == (4, 4)
    with pytest.raises(AutoparError, match="no loss"):
        search_captured(traced, preset("local", 1), TrainSpec(global_batch=2, seq_len=32))


def test_nothing_to_train() -> None:
    model = Net().requires_grad_(False)
    with pytest.raises(AutoparError, match="nothing to train: every parameter is frozen"):
        check_model(trace(model, {"ids": torch.zeros(2, 12, dtype=torch.long)}), 8)


def test_pins_without_effect_are_told() -> None:
    one = Plan(degrees=Degrees(), global_batch=4, seq_len=8, micro_batch=1, stages=(("blocks.0-1",),))
    all_axes = one.replace(
        degrees=Degrees(dp=2, cp=2, tp=2, pp=2), stages=(("blocks.0",), ("blocks.1",)), zero=1,
        checkpoint={"blocks.*": "full"},
    )  # fmt: skip
    texts = ["context_parallel=ring", "zero_group=2", "checkpoint_segment=2", "schedule=gpipe", "blocks.*=R"]
    for text in texts:
        (notice,) = pins_without_effect(Pins.parse([text]), one)
        assert text.removesuffix("=R") in notice
    assert pins_without_effect(Pins.parse(texts), all_axes) == pins_without_effect(Pins(), one) == []


def test_a_pinned_dim_has_to_exist() -> None:
    traced = captured()
    check_pinned_dims(traced, Pins(modules={"blocks.*.0": "shard(1)", "blocks.*.0.bias": "shard(0)"}))
    with pytest.raises(
        SpecError, match=r"blocks.0.0.weight of shape \(8, 8\) has no dim 7. Try: one of shard\(0\), sh"
    ):
        check_pinned_dims(traced, Pins(modules={"blocks.*.0": "shard(7)"}))
    with pytest.raises(SpecError, match="bias of shape"):
        check_pinned_dims(traced, Pins(modules={"blocks.*.0.bias": "shard(1)"}))


def test_devices_that_do_not_factor_list_what_would() -> None:
    limits = ModelLimits(4, lambda tp: tp in (1, 2, 4), lambda cp, tp: ())
    with pytest.raises(InfeasiblePlanError, match="no degrees factor 7 devices") as caught:
        enumerate_partitions(7, 8, 16, limits, Pins())
    assert "multiple of 7, or 4, 6, 8, 12 devices" in str(caught.value)
    assert enumerate_partitions(7, 14, 16, limits, Pins())
    for devices in (4, 6, 8, 12):
        assert enumerate_partitions(devices, 8, 16, limits, Pins())
