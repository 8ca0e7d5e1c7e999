"""Every overlap of a plan changes no bit of the gradients, or only their rounding where it says so; and it is there."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.build import build
from autopar.errors import SpecError
from autopar.mesh import Degrees
from autopar.passes import apply, prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.sharding import local_part
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed


Captured = dict[str, tuple[nn.Module, Any]]


class _Order(TorchDispatchMode):
    """Collectives and matrix products in the order they are issued."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if func.namespace == "c10d" or name in ("mm", "addmm", "bmm"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def _gradients(model: nn.Module, traced: Any, plan: Plan) -> tuple[Tensor, list[Tensor], Any]:
    pm = build(copy.deepcopy(model), traced, plan)
    loss = pm.step(models.default_batch())
    return loss, [local_part(p.grad).clone() for p in pm.parameters() if p.grad is not None], pm


def _same(one: Any, other: Any, exact: bool) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=0 if exact else 1e-12)
    for a, b in zip(one[1], other[1], strict=True):
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=0, atol=1e-13)


def _models() -> Captured:
    built = {"tiny_gpt": models.tiny_gpt(), "llama": models.llama4kv_tiny()}
    return {name: (model, prepare(trace(model, models.default_batch()))) for name, model in built.items()}


def _tensor_parallel(captured: Captured) -> None:
    for name, (model, traced) in captured.items():
        for sp in (True, False):
            plan = plans.megatron(name, Degrees(tp=2), micro_batch=4, sequence_sharding=sp).replace(overlap=())
            plain = _gradients(model, traced, plan)
            linear = _gradients(model, traced, plan.replace(overlap=("tp_linear",)))
            _same(linear, plain, exact=True)
            assert "overlap tp_linear: applied" in linear[2].report()
            assert "not applied" not in linear[2].report()
        ring = plan.replace(sequence_sharding=True, overlap=("tp_ring", "tp_linear"))
        _same(_gradients(model, traced, ring), plain, exact=False)
        layers = {"tiny_gpt": "blocks.*", "llama": "model.layers.*"}[name]
        again = ring.replace(checkpoint={layers: "full"})
        _same(_gradients(model, traced, again), plain, exact=False)


def _order_of_a_linear(captured: Captured) -> None:
    model, traced = captured["llama"]
    for overlap, under in (((), False), (("tp_linear",), True)):
        plan = plans.megatron("llama", Degrees(tp=2), micro_batch=8, sequence_sharding=False).replace(overlap=overlap)
        pm = build(copy.deepcopy(model), traced, plan)
        with _Order() as order:
            pm.step(models.default_batch())
        # Backward of q, k and v: three input gradients, then the sum leaves, then three weight gradients.
        # In the first layer nothing else follows: without overlap the sum is the last thing that happens.
        last = "allreduce_ mm mm mm" if under else "mm mm mm allreduce_"
        assert " ".join(order.seen[-4:]) == last, order.seen


def _four_ranks(captured: Captured) -> None:
    """Summed in another order than two; with dp, pp and ZeRO around them."""
    model, traced = captured["llama"]
    for degrees, zero in ((Degrees(tp=4), 0), (Degrees(tp=2, dp=2), 3), (Degrees(tp=2, pp=2), 0)):
        plan = plans.megatron("llama", degrees, micro_batch=2).replace(zero=zero, overlap=())
        plain = _gradients(model, traced, plan)
        for overlap, exact in ((("tp_ring",), False), (("tp_linear", "zero3_gather"), True)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _same(_gradients(model, traced, plan.replace(overlap=overlap)), plain, exact=exact)


def _data_and_pipeline(captured: Captured) -> None:
    model, traced = captured["tiny_gpt"]
    two = {
        "zero3_gather": plans.megatron("tiny_gpt", Degrees(dp=2), micro_batch=2).replace(zero=3),
        "cp_ring": plans.megatron("tiny_gpt", Degrees(cp=2), micro_batch=4),
        "pp_send": plans.megatron("tiny_gpt", Degrees(pp=2), micro_batch=1),
        "dp_reduce": plans.megatron("tiny_gpt", Degrees(dp=2), micro_batch=2),
    }
    for name, plan in two.items():
        plain = _gradients(model, traced, plan.replace(overlap=()))
        _same(_gradients(model, traced, plan.replace(overlap=(name,))), plain, exact=True)
    few = two["pp_send"].replace(overlap=("pp_send",), micro_batch=8)  # one micro-batch, two stages
    _same(_gradients(model, traced, few), _gradients(model, traced, few.replace(overlap=())), exact=True)


def _four_stages(captured: Captured) -> None:
    model, traced = captured["tiny_gpt"]
    plan = plans.megatron("tiny_gpt", Degrees(pp=4), micro_batch=1).replace(overlap=())
    plain = _gradients(model, traced, plan)
    _same(_gradients(model, traced, plan.replace(overlap=("pp_send",))), plain, exact=True)


def _two() -> None:
    captured = _models()
    _tensor_parallel(captured)
    _order_of_a_linear(captured)
    _data_and_pipeline(captured)


def test_overlaps_of_every_axis_keep_the_gradients_and_send_early() -> None:
    run_ranks(2, _two, timeout_s=280)


def _four() -> None:
    captured = _models()
    _four_ranks(captured)
    _four_stages(captured)


def test_four_ranks_and_overlaps_together() -> None:
    run_ranks(4, _four, timeout_s=280)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SpecError, match="overlap: 'tp_magic' is not one of dp_reduce, tp_linear"):
        plans.megatron("tiny_gpt", Degrees(tp=2)).replace(overlap=("tp_magic",))


def test_a_row_parallel_linear_and_its_gather_go_round_the_ring() -> None:
    traced = prepare(trace(models.llama4kv_tiny(), models.default_batch()))
    plan = plans.megatron("llama", Degrees(tp=2)).replace(overlap=("tp_ring",))
    (stage,) = apply(traced, plan)
    block = next(m for name, m in stage.graph_module.named_children() if "layers_0" in name)
    targets = Counter(getattr(n.target, "__name__", "") for n in block.graph.nodes if n.op == "call_function")
    assert targets["column_linears"] == 2, "q, k and v; gate and up"
    assert targets["linear_scattered"] == 2, "o and down"
    assert stage.unapplied == ()
