"""ZeRO 1, 2 and 3 train as one process (fp64), with every other axis; and divide what docs/zero.md says they divide."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.build import build
from autopar.errors import SpecError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.sharding import local_part
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models, plans

pytestmark = pytest.mark.distributed


def tiny_gpt() -> tuple[nn.Module, dict[str, Any]]:
    return models.tiny_gpt(), models.default_batch()


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return models.llama4kv_tiny(), models.default_batch()


def eight_layers() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return models.TinyGPT(layers=8).double(), models.default_batch()


def _check(factory: Any, wanted: list[Plan]) -> None:
    failed = [r.text() for r in verify_plans(factory, wanted, timeout_s=250) if not r.passed]
    assert not failed, "\n\n".join(failed)


def _plan(model: str, degrees: Degrees, zero: int, micro_batch: int = 2, **options: Any) -> Plan:
    return plans.megatron(model, degrees, micro_batch=micro_batch, **options).replace(zero=zero)


def test_two_ranks_every_level() -> None:
    two = Degrees(dp=2)
    wanted = [_plan("tiny_gpt", two, level, micro_batch) for level in (1, 2, 3) for micro_batch in (1, 4)]
    _check(tiny_gpt, [*wanted, _plan("tiny_gpt", two, 3, checkpoint=True), _plan("tiny_gpt", Degrees(cp=2), 2)])


@pytest.mark.parametrize("degrees", [Degrees(dp=2, tp=2), Degrees(dp=2, pp=2), Degrees(dp=2, cp=2)], ids=str)
def test_with_another_axis(degrees: Degrees) -> None:
    _check(llama, [_plan("llama", degrees, level) for level in (1, 2, 3)])


def test_with_tied_and_interleaved_stages() -> None:
    _check(
        tiny_gpt,
        [
            _plan("tiny_gpt", Degrees(dp=2, pp=2), 3, checkpoint=True),
            _plan("tiny_gpt", Degrees(dp=2, pp=2), 1, schedule="interleaved", virtual_stages=2),
            _plan("tiny_gpt", Degrees(dp=2, pp=2), 3, schedule="interleaved", virtual_stages=2),
            _plan("tiny_gpt", Degrees(dp=2, tp=2), 3, checkpoint=True),
        ],
    )


def test_hybrid_sharding() -> None:
    """Two copies of two shards, alone and with the other axes; every level."""
    four = Degrees(dp=4)
    wanted = [_plan("tiny_gpt", four, level, micro_batch=1) for level in (1, 2, 3)]
    mixed = _plan("tiny_gpt", Degrees(dp=2, cp=2), 3, checkpoint=True).replace(zero_group=1)  # shards over cp alone
    _check(tiny_gpt, [*(plan.replace(zero_group=2) for plan in wanted), mixed])


class _Issued(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.split("::")[-1]] += 1
        return func(*args, **(kwargs or {}))


LAYERS, MICRO_BATCHES = models.LAYERS, 2
_M = MICRO_BATCHES
# (all-gathers, reduce-scatters) a step: those of the layers and of the root, as docs/zero.md has them
_COUNTS = {
    1: (LAYERS + 1, LAYERS + 1),
    2: (LAYERS + 1, _M * (LAYERS + 1)),
    3: (_M * (2 * LAYERS + 1), _M * (LAYERS + 1)),
}


def _table() -> None:
    model, batch = tiny_gpt()
    traced = prepare(trace(model, batch))
    everything = sum(p.numel() for p in model.parameters())
    for level, counts in _COUNTS.items():
        pm = build(tiny_gpt()[0], traced, _plan("tiny_gpt", Degrees(dp=2), level))
        optimizer = pm.optimizer(torch.optim.AdamW)
        for _ in range(2):  # the second step is the one counted: the first sets up
            optimizer.zero_grad()
            with _Issued() as issued:
                pm.step(batch)
            optimizer.step()
        seen = issued.counts
        assert (seen["_allgather_base_"], seen["_reduce_scatter_base_"]) == counts, f"level {level}: {seen}"
        held = [local_part(p).numel() for p in pm.parameters()]
        assert sum(held) == everything // 2
        assert sum(local_part(p.grad).numel() for p in pm.parameters() if p.grad is not None) == everything // 2
        moments = [s["exp_avg"] for s in optimizer.state.values()]
        assert all(isinstance(x, DTensor) for x in moments)
        assert sum(local_part(x).numel() for x in moments) == everything // 2


def test_the_table_of_the_documentation() -> None:
    run_ranks(2, _table, timeout_s=120)


def _hybrid_table() -> None:
    """One all-reduce a unit more, and the rest as for two ranks; halves instead of quarters are held."""
    model, batch = tiny_gpt()
    traced = prepare(trace(model, batch))
    everything = sum(p.numel() for p in model.parameters())
    for level, counts in _COUNTS.items():
        plan = _plan("tiny_gpt", Degrees(dp=4), level, micro_batch=1).replace(zero_group=2)
        pm = build(tiny_gpt()[0], traced, plan)
        pm.step(batch)
        pm.zero_grad()
        with _Issued() as issued:
            pm.step(batch)
        seen = issued.counts
        assert (seen["_allgather_base_"], seen["_reduce_scatter_base_"]) == counts, f"level {level}: {seen}"
        # And the token count, the loss, and whether a rank has something to refuse.
        assert seen["allreduce_"] == LAYERS + 1 + 3, f"level {level}: {seen}"
        assert sum(local_part(p).numel() for p in pm.parameters()) == everything // 2
        assert pm.differing_copies() == []
        loss = pm(**batch)
        pm.zero_grad()
        loss.backward()
        reference = tiny_gpt()[0]
        reference(**batch).backward()
        for name, gradient in pm.full_gradients().items():
            expected = dict(reference.named_parameters())[name].grad
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12, msg=name)
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
        torch.testing.assert_close(pm.clip_grad_norm_(1.0), norm, rtol=1e-12, atol=0)
        if dist.get_rank() >= 2:  # the other copy
            with torch.no_grad():
                local_part(dict(pm.named_parameters())["norm.weight"]).add_(1.0)
        assert pm.differing_copies() == ["norm.weight"]


def test_hybrid_sharding_divides_by_the_group_and_sums_over_the_copies_once() -> None:
    run_ranks(4, _hybrid_table, timeout_s=200)


def test_a_group_that_cannot_be_is_refused() -> None:
    for degrees, zero, group, text in (
        (Degrees(dp=4), 0, 2, "zero 0 shards nothing"),
        (Degrees(dp=4), 3, 3, "shared by 3 of 4 dp ranks.*one of 2, 4"),
        (Degrees(tp=2), 3, 2, "2 of 1 dp ranks.*Try: 0"),
    ):
        with pytest.raises(SpecError, match=text):
            _plan("tiny_gpt", degrees, zero).replace(zero_group=group)


def _called() -> None:
    model, batch = tiny_gpt()
    traced = prepare(trace(model, batch))
    loss = model(**batch)
    loss.backward()
    expected = dict(model.named_parameters())
    for level in (1, 3):
        pm = build(tiny_gpt()[0], traced, _plan("tiny_gpt", Degrees(dp=2), level))
        mine = pm(**batch)
        mine.backward()
        torch.testing.assert_close(mine, loss)
        for name, gradient in pm.full_gradients().items():
            torch.testing.assert_close(gradient, expected[name].grad, rtol=0, atol=1e-12, msg=name)
        # 6 rows here, 2 there: the rank that runs out goes on with rows that count nothing. 5 and 3: both end with one.
        for first in (6, 5):
            pm.zero_grad()
            mine = {name: t[:first] if dist.get_rank() == 0 else t[first:] for name, t in batch.items()}
            torch.testing.assert_close(pm.step(mine, local=True), loss.detach(), rtol=0, atol=1e-12)
            for name, gradient in pm.full_gradients().items():
                torch.testing.assert_close(gradient, expected[name].grad, rtol=0, atol=1e-12, msg=name)
        mine = {name: t[: 8 - 8 * dist.get_rank()] for name, t in batch.items()}
        with pytest.raises(SpecError, match="dp rank 1 has no rows.*one without targets adds nothing"):
            pm.step(mine, local=True)


def test_calling_the_module_and_unequal_rows_equal_one_process() -> None:
    run_ranks(2, _called, timeout_s=120)
