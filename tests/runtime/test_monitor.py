"""Monitoring: parts add up, slow ranks are named, memory advice fits; traces say what was hidden."""

from __future__ import annotations

import copy
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.build import build
from autopar.errors import AutoparError, SpecError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.launch import run_ranks
from autopar.runtime.memory_advice import memory_advice
from autopar.runtime.monitor import PARTS, slow_ranks
from autopar.runtime.step_trace import communication_and_exposed, exposed_and_hidden, union
from autopar.trace import trace
from tests import models, plans


def _prediction(stages: int) -> dict[str, Any]:
    return {
        "step_time_s": 0.5,
        "mfu": 0.4,
        "time_s": {"tp_communication": 0.1, "dp_communication": 0.01},
        "peak_memory_bytes": [{"total": 1000 + i} for i in range(stages)],
    }


def _monitored(folder: str) -> list[dict[str, Any]]:
    """Every kind of wait, one layout after another; rank 1 is made slow in the last."""
    model, batch = models.tiny_gpt(), models.default_batch()
    traced, records = prepare(trace(model, batch)), []
    layouts = [(Degrees(tp=2), 0), (Degrees(dp=2), 3), (Degrees(pp=2), 0), (Degrees(cp=2), 0), (Degrees(dp=2), 0)]
    for i, (degrees, zero) in enumerate(layouts):
        plan = plans.megatron("tiny_gpt", degrees, micro_batch=2)
        plan = plan.replace(zero=zero, prediction=_prediction(degrees.pp))
        pm = build(copy.deepcopy(model), traced, plan)
        optimizer = pm.optimizer(torch.optim.SGD, lr=0.1)
        if i == len(layouts) - 1 and dist.get_rank() == 1:
            pm._graphs[0].register_forward_pre_hook(lambda *_: time.sleep(0.2))
        path = Path(folder) / f"{i}.jsonl"
        with pm.monitor(path, every=2) as monitor:
            for _ in range(3):
                pm.step(batch)
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.05)
        assert [r.step for r in monitor.records] == [2, 3]
        if dist.get_rank() == 0:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            assert [line["steps"] for line in lines] == [2, 1]
        records.append(monitor.records[0].to_data())
    return records


@pytest.mark.distributed
def test_parts_add_up_and_the_slow_rank_is_named(tmp_path: Path) -> None:
    one, other = run_ranks(2, _monitored, str(tmp_path), timeout_s=200)
    assert one == other, "every rank knows what all did"
    tp, zero, pp, cp, slow = one
    for record in one:
        for parts in record["ranks"]:
            assert set(parts) == set(PARTS)
            assert all(seconds >= 0 for seconds in parts.values())
            assert parts["compute"] > 0
            assert parts["data"] > 0.04, "the sleep between steps"
        total = max(sum(parts.values()) for parts in record["ranks"])
        assert total == pytest.approx(record["step_time_s"], rel=0.05)
        assert record["tokens_per_s"] == pytest.approx(8 * 16 / record["step_time_s"], rel=1e-6)
        assert record["mfu"] == pytest.approx(0.4 * 0.5 / record["step_time_s"], rel=1e-6)
    for record, axis in ((tp, "tp"), (zero, "dp"), (pp, "bubble"), (cp, "cp")):
        waited = {name for name in ("tp", "cp", "dp", "bubble") if record["ranks"][0][name] > 0}
        assert axis in waited
        assert waited <= {axis, "dp"}, "dp: sums over the ranks of data parallelism, and those of no axis"
    assert slow["stragglers"] == [1]
    assert slow["imbalance"] > 1.1
    assert slow["ranks"][0]["dp"] > 0.1, "the others wait for it"
    assert pp["predicted"] == [1000, 1001]


def test_stages_are_compared_with_their_own_kind() -> None:
    plan = plans.megatron("tiny_gpt", Degrees(pp=2, dp=2), micro_batch=2)
    assert slow_ranks([1.0, 1.0, 3.0, 3.0], plan) == [], "another stage does other work"
    assert slow_ranks([1.0, 1.0, 3.0, 5.0], plan) == [3]
    assert slow_ranks([1.0, 1.05, 3.0, 3.1], plan) == []


def test_advice_near_the_limit() -> None:
    plan = plans.megatron("tiny_gpt", Degrees(dp=2), micro_batch=4)
    gib = 2**30
    assert memory_advice(plan, [5 * gib, 6 * gib], 6 * gib, 10 * gib) == []
    assert memory_advice(plan, [5 * gib], 0, None) == []
    said = " ".join(memory_advice(plan, [5 * gib, int(9.5 * gib)], int(9.6 * gib), 10 * gib))
    assert "rank 1 holds 9.60 of 10.00 GiB" in said
    assert "micro_batch 2 instead of 4" in said
    assert "4 of 4 layers are not checkpointed" in said
    assert "zero 1 instead of 0" in said
    assert "fragmentation" not in said
    frugal = plans.megatron("tiny_gpt", Degrees(dp=2), micro_batch=1, checkpoint=True).replace(zero=3)
    said = memory_advice(frugal, [5 * gib], int(9.5 * gib), 10 * gib)
    assert len(said) == 2
    assert "4.50 GiB of it is fragmentation" in said[1]


def test_intervals_of_communication_are_hidden_or_exposed() -> None:
    communication = union([(0, 2), (1, 4), (6, 8)])
    assert communication == [(0, 4), (6, 8)]
    assert exposed_and_hidden(communication, union([(1, 3), (7, 9)])) == (3, 3)
    assert exposed_and_hidden(communication, []) == (6, 0)
    assert exposed_and_hidden(communication, [(0, 10)]) == (0, 6)
    assert exposed_and_hidden([], [(0, 1)]) == (0, 0)


def _event(name: str, start: float, end: float, *, device: str = "CUDA", annotation: bool = False) -> Any:
    """As the profiler gives them, in microseconds."""
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start * 1e6, end=end * 1e6),
        device_type=getattr(torch.profiler.DeviceType, device),
        is_user_annotation=annotation,
    )


def test_spans_that_the_host_named_are_no_kernels() -> None:
    events = [
        _event("ncclDevKernel_AllReduce_Sum", 2, 6),
        _event("sm90_gemm", 0, 3),
        _event("nccl:all_reduce", 0, 1, device="CPU"),  # the launch
        _event("nccl:all_reduce", 1, 6, annotation=True),
        _event("autopar:step", 0, 10, annotation=True),
        _event("autopar:step", 0, 12, device="CPU"),
    ]
    assert communication_and_exposed(events, cuda=True) == (4, 3)
    waits = [_event("gloo:all_reduce", 0, 4, device="CPU"), _event("waiting:tp", 3, 5, device="CPU")]
    assert communication_and_exposed(waits, cuda=False) == (4, 1)


def _traced(folder: str) -> str:
    model, batch = models.tiny_gpt(), models.default_batch()
    plan = plans.megatron("tiny_gpt", Degrees(tp=2), micro_batch=4).replace(prediction=_prediction(1))
    pm = build(copy.deepcopy(model), prepare(trace(model, batch)), plan)
    steps = pm.trace(Path(folder) / "trace.json")
    with pytest.raises(AutoparError, match="nothing has been traced yet"):
        steps.summary  # noqa: B018
    with pm.monitor() as monitor, steps:
        pm.step(batch)
        pm.step(batch)
    pm.step(batch)
    assert monitor.records[0].ranks[0]["tp"] > 0, "both measure"
    found = steps.summary
    assert steps.steps == 2
    assert found.step_s > found.communication_s > 0
    assert 0 <= found.hidden_s <= found.communication_s
    assert found.exposed_by_axis["tp"] > 0
    return found.text()


def _odd_paths(folder: str) -> list[Any]:
    """Rank 0 alone writes records; what it cannot, every rank says before the first step."""
    model, batch = models.tiny_gpt(torch.float32), models.default_batch()
    pm = build(model, prepare(trace(model, batch)), plans.megatron("tiny_gpt", Degrees(dp=2), precision="fp32"))
    there = Path(folder)
    with pytest.raises(SpecError, match="monitor: path: rank 0: .* is a folder"):
        pm.monitor(there)
    (there / "file").write_text("")
    with pytest.raises(SpecError, match="monitor: path: rank 0: cannot write .*file/metrics.jsonl"):
        pm.monitor(there / "file" / "metrics.jsonl")
    with pytest.raises(SpecError, match="trace: path: rank 0: cannot write"):
        pm.trace(there / "file" / "trace.json")
    with torch.no_grad():
        for p in pm.parameters():
            p.fill_(float("nan"))
    path = there / "made" / "metrics.jsonl"
    with pm.monitor(path, every=1), pm.trace(there / "made" / "run.v1.2") as traced:
        pm.step(batch)
    assert traced.path == there / "made" / f"run.v1.2.rank{dist.get_rank()}.json"
    assert traced.path.stat().st_size > 0
    return [] if dist.get_rank() else path.read_text(encoding="utf-8").splitlines()


@pytest.mark.distributed
def test_what_cannot_be_written_is_said_before_the_first_step_and_records_are_json(tmp_path: Path) -> None:
    line, *others = run_ranks(2, _odd_paths, str(tmp_path), timeout_s=100)[0]

    def no_json(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert not others
    assert json.loads(line, parse_constant=no_json)["loss"] is None, "it was not a number"


@pytest.mark.distributed
def test_a_trace_holds_the_steps_and_tells_what_was_hidden(tmp_path: Path) -> None:
    for rank, text in enumerate(run_ranks(2, _traced, str(tmp_path), timeout_s=120)):
        events = json.loads((tmp_path / f"trace.rank{rank}.json").read_text(encoding="utf-8"))["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"autopar:step", "waiting:tp"} <= names
        assert re.search(r"^tp +[\d.]+ ms +100.00 ms$", text, re.MULTILINE), "the prediction stands beside"


def test_bad_options_are_refused(tmp_path: Path) -> None:
    model, batch = models.tiny_gpt(), models.default_batch()
    pm = build(model, prepare(trace(model, batch)), plans.megatron("tiny_gpt", Degrees()))
    with pytest.raises(SpecError, match="monitor: every: must be a positive integer"):
        pm.monitor(every=0)
    with pytest.raises(SpecError, match="monitor: unknown option 'evry'. Try: one of every, tensorboard, memory_limit"):
        pm.monitor(evry=2)
