"""Ranks of many plans run on fake tensors: what they send is what the cost model predicts, whatever the world size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from autopar import cli, passes
from autopar.cost_model.search import search
from autopar.dryrun import DryRun, dry_run_captured
from autopar.dryrun.result import CollectiveRow, MemoryRow
from autopar.errors import PlanMismatchError, SpecError
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.runtime import collectives
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from tests import models, plans


@pytest.fixture(scope="module")
def llama() -> TracedModel:
    return passes.prepare(trace(models.llama4kv_tiny(), models.default_batch()))


@pytest.fixture(scope="module")
def tied_gpt() -> TracedModel:
    return passes.prepare(trace(models.tiny_gpt(), models.default_batch()))


def llama_plan(degrees: Degrees, **options: object) -> Plan:
    return plans.megatron("llama", degrees, **options)  # type: ignore[arg-type]


WIDE = Degrees(dp=4, tp=4, pp=4)


@pytest.mark.parametrize(
    ("checkpoint", "sequence_sharding", "schedule"),
    [(False, False, "1f1b"), (False, True, "gpipe"), (True, False, "gpipe"), (True, True, "1f1b")],
)
def test_a_mesh_of_64(llama: TracedModel, checkpoint: bool, sequence_sharding: bool, schedule: str) -> None:
    plan = llama_plan(WIDE, checkpoint=checkpoint, sequence_sharding=sequence_sharding, schedule=schedule)
    result = dry_run_captured(plan, llama)
    assert [rank.stage for rank in result.ranks] == [0, 1, 2, 3]
    assert [rank.rank for rank in result.ranks] == [0, 16, 32, 48]
    assert result.agrees, result.text()
    assert all(rank.collectives for rank in result.ranks)


@pytest.mark.parametrize(
    ("kind", "checkpoint"), [("ring", True), ("ring", False), ("all-gather", True), ("all-to-all", True)]
)
def test_context_parallel(llama: TracedModel, kind: str, checkpoint: bool) -> None:
    degrees = Degrees(cp=2, tp=2, pp=2, dp=2)
    plan = llama_plan(degrees, checkpoint=checkpoint).replace(context_parallel=kind)
    result = dry_run_captured(plan, llama)
    assert result.agrees, result.text()
    assert any(row.axis == "cp" and row.purpose == "activations" for row in result.ranks[0].collectives)


@pytest.mark.parametrize(
    ("zero", "degrees", "options"),
    [
        (1, Degrees(dp=4), {}),
        (2, Degrees(dp=2, cp=2, tp=2), {}),
        (3, Degrees(dp=2, tp=2, pp=2), {"checkpoint": True}),
        (3, Degrees(dp=2, pp=4), {}),
        (3, Degrees(dp=2, pp=2), {"schedule": "interleaved", "virtual_stages": 2}),
        (3, Degrees(cp=2, pp=2), {"schedule": "interleaved", "virtual_stages": 2}),  # more than three rounds
        (2, Degrees(dp=4), {"zero_group": 2}),
        (3, Degrees(cp=4), {}),
    ],
)
def test_sharded_ranks(llama: TracedModel, zero: int, degrees: Degrees, options: dict[str, object]) -> None:
    """FSDP's own gathers and scatters, whatever is run of the step's micro-batches."""
    plan = llama_plan(degrees, **{k: v for k, v in options.items() if k != "zero_group"})
    result = dry_run_captured(plan.replace(zero=zero, zero_group=options.get("zero_group", 0)), llama)
    assert result.agrees, result.text()
    rows = {(row.purpose, row.kind) for row in result.ranks[0].collectives}
    assert {("parameters", "all_gather"), ("gradients", "reduce_scatter")} <= rows


def test_a_stage_gathers_its_own_layers_once(llama: TracedModel) -> None:
    """Two layers without embedding or head: before the first of them the stage has run the second, of another
    micro-batch, which no backward will need."""
    plan = llama_plan(Degrees(dp=2, pp=2), schedule="interleaved", virtual_stages=2)
    layers = [f"model.layers.{i}" for i in range(4)]
    result = dry_run_captured(plan.replace(zero=1, stages=((layers[0],), (layers[1],), tuple(layers[2:]), ())), llama)
    assert result.agrees, result.text()


def test_sharding_divides_what_it_says(llama: TracedModel) -> None:
    def held(zero: int) -> dict[str, int]:
        memory = dry_run_captured(llama_plan(Degrees(dp=4)).replace(zero=zero), llama, [0]).ranks[0].memory
        return {row.category: row.measured for row in memory}

    whole, *levels = [held(zero) for zero in range(4)]
    assert all(level["optimizer"] == pytest.approx(whole["optimizer"] / 4, rel=0.01) for level in levels)
    totals = [level["total"] for level in levels]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 3


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "degrees"),
    [
        ("interleaved", 2, Degrees(pp=2, tp=2)),
        ("zero-bubble", 1, Degrees(pp=2, dp=2)),
        ("zero-bubble", 2, Degrees(pp=2)),
    ],
)
def test_looped_schedules(llama: TracedModel, schedule: str, virtual_stages: int, degrees: Degrees) -> None:
    result = dry_run_captured(llama_plan(degrees, schedule=schedule, virtual_stages=virtual_stages), llama)
    assert result.agrees, result.text()


@pytest.mark.parametrize("mode", ["selective", "selective-ops", "full"])
@pytest.mark.parametrize("kind", ["ring", "all-gather", "all-to-all"])
def test_what_a_second_run_sends(llama: TracedModel, mode: str, kind: str) -> None:
    plan = llama_plan(Degrees(cp=2, tp=2), sequence_sharding=kind != "ring").replace(context_parallel=kind)
    result = dry_run_captured(plan.replace(checkpoint={"model.layers.0-2": mode}, checkpoint_segment=2), llama)
    assert result.agrees, result.text()


def test_selective_modes_hold_what_lies_between(llama: TracedModel) -> None:
    def activations(mode: str, segment: int = 1) -> int:
        plan = llama_plan(Degrees(tp=2)).replace(checkpoint={"model.layers.*": mode}, checkpoint_segment=segment)
        memory = dry_run_captured(plan, llama, [0]).ranks[0].memory
        return next(row.measured for row in memory if row.category == "activations")

    held = [activations(mode) for mode in ("none", "selective", "selective-ops", "full")]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 4


@pytest.mark.parametrize(
    ("degrees", "virtual_stages", "zero"),
    [
        (Degrees(pp=4), 1, 0),
        (Degrees(pp=2, tp=2), 1, 0),
        (Degrees(pp=2, dp=2), 1, 0),
        (Degrees(tp=4, dp=2), 1, 0),
        (Degrees(pp=2, tp=2), 2, 0),
        (Degrees(pp=2, dp=2), 1, 1),
        (Degrees(pp=2, dp=2, tp=2), 2, 3),
    ],
)
def test_tied_weights_are_summed_over_their_ranks(
    tied_gpt: TracedModel, degrees: Degrees, virtual_stages: int, zero: int
) -> None:
    """Stages of one rank add up in one tensor; ZeRO leaves a shard of the sum to be added."""
    schedule = "interleaved" if virtual_stages > 1 else "1f1b"
    plan = plans.megatron("tiny_gpt", degrees, schedule=schedule, virtual_stages=virtual_stages)
    result = dry_run_captured(plan.replace(zero=zero), tied_gpt)
    assert result.agrees, result.text()
    tied = [row for rank in result.ranks for row in rank.collectives if (row.purpose, row.axis) == ("gradients", "pp")]
    assert len(tied) == (2 if degrees.pp > 1 else 0)
    whole = models.VOCAB // degrees.tp * models.DIM * 8
    assert {row.nbytes for row in tied} <= {whole // (degrees.dp if zero else 1)}


@pytest.mark.parametrize(("family", "pins"), [
    ("t5", "dp=2 pp=2 schedule=interleaved virtual_stages=2 zero=0"),  # a weight that both chunks of a rank read
    ("mixtral", "cp=2 tp=2 sp=false context_parallel=all-gather checkpoint=full"),  # routed tokens are not cut over cp
])  # fmt: skip
def test_searched_plans_of_other_families(family: str, pins: str) -> None:
    traced = passes.prepare(models.captured(family))
    precision = "fp32" if family == "mixtral" else "fp64"
    cluster, train = ClusterSpec.parse("local:4"), TrainSpec(global_batch=4, seq_len=16, precision=precision)
    result = dry_run_captured(search(traced, cluster, train, Pins.parse(pins.split())).plan, traced)
    assert result.agrees, result.text()


def test_one_rank_needs_no_process_group(llama: TracedModel) -> None:
    result = dry_run_captured(llama_plan(Degrees()), llama)
    assert result.agrees
    assert result.ranks[0].collectives == ()
    assert result.ranks[0].parameters == llama.parameter_count
    assert not torch.distributed.is_initialized()


def test_memory_by_category(llama: TracedModel) -> None:
    rank = dry_run_captured(llama_plan(Degrees(tp=2)), llama).ranks[0]
    held = {row.category: row.measured for row in rank.memory}
    assert held["parameters"] == held["gradients"] == 8 * rank.parameters
    # Two moments as large as the parameters, and a step count of four bytes for each tensor.
    assert held["optimizer"] == pytest.approx(16 * rank.parameters, rel=0.01)
    assert held["activations"] > 0
    assert held["total"] == sum(value for name, value in held.items() if name != "total")


def test_checkpointing_and_fewer_micro_batches_hold_less(llama: TracedModel) -> None:
    def activations(**options: object) -> int:
        memory = dry_run_captured(llama_plan(Degrees(pp=2), **options), llama, [0]).ranks[0].memory
        return next(row.measured for row in memory if row.category == "activations")

    kept, again = activations(), activations(checkpoint=True)
    assert again < 0.7 * kept
    # Eight micro-batches: 1F1B holds two of them on the first of two stages, GPipe all eight.
    assert activations(schedule="gpipe") > 3 * kept


def test_not_all_micro_batches_need_to_run(llama: TracedModel) -> None:
    rank = dry_run_captured(llama_plan(Degrees(pp=2)), llama, [0]).ranks[0]
    assert (rank.micro_batches_run, rank.micro_batches) == (3, 8)
    boundary = next(row for row in rank.collectives if row.purpose == "boundary")
    assert boundary.count == 8


def test_what_is_not_as_predicted_is_an_error(llama: TracedModel) -> None:
    result = dry_run_captured(llama_plan(Degrees(tp=2)), llama)
    rank = result.ranks[0]
    wrong = dataclasses.replace(rank.collectives[0], predicted=rank.collectives[0].count + 1)
    bad = dataclasses.replace(result, ranks=(dataclasses.replace(rank, collectives=(wrong, *rank.collectives[1:])),))
    assert result.agrees
    assert not bad.agrees
    assert "\n! activations" in bad.text()
    assert "DIFFERS" in bad.text()
    assert not dataclasses.replace(result, broken_boundaries=("stage 0 sends a, stage 1 receives b",)).agrees


def test_a_collective_that_is_left_out_shows(llama: TracedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction is made from the plan, the run from the rewritten graph and the runtime's kernels."""
    plan = llama_plan(Degrees(tp=2), sequence_sharding=False)
    assert dry_run_captured(plan, llama).agrees
    monkeypatch.setitem(collectives._COLLECTIVES, "all_reduce", collectives._none)
    assert not dry_run_captured(plan, llama).agrees


def test_memory_off_by_more_than_five_percent_warns(llama: TracedModel) -> None:
    rank = dry_run_captured(llama_plan(Degrees(tp=2)), llama).ranks[0]
    measured = rank.memory[-1].measured

    def predicted(total: float) -> DryRun:
        memory = (*rank.memory[:-1], MemoryRow("total", measured, round(total)))
        return DryRun(llama_plan(Degrees(tp=2)), (dataclasses.replace(rank, memory=memory),), (), ())

    assert predicted(1.04 * measured).warnings == []
    assert "-6.0 % off" in predicted(0.94 * measured).warnings[0]
    assert predicted(0.94 * measured).agrees


@pytest.mark.parametrize("rank", [-1, 64])
def test_a_rank_outside_the_mesh_is_refused(llama: TracedModel, rank: int) -> None:
    with pytest.raises(SpecError, match=rf"rank {rank} is outside the plan's 64 ranks.*0 to 63"):
        dry_run_captured(llama_plan(WIDE), llama, [rank])


def test_a_plan_of_another_model_is_refused(tied_gpt: TracedModel) -> None:
    with pytest.raises(PlanMismatchError, match="no such layer"):
        dry_run_captured(llama_plan(Degrees(tp=2)), tied_gpt)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    searched = ["plan", "--model", "llama-tiny", "--cluster", "local:8", "--global-batch", "16", "--seq-len", "64"]
    assert cli.main([*searched, "--pin", "tp=2", "--pin", "pp=2", "--pin", "zero=0", "-o", str(path)]) == 0
    capsys.readouterr()
    assert cli.main(["dryrun", str(path), "--model", "llama-tiny", "--rank", "5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["agrees"] is True
    assert data["world_size"] == 8
    (rank,) = data["ranks"]
    assert (rank["rank"], rank["stage"]) == (5, 1)
    assert {row["purpose"] for row in rank["collectives"]} == {"activations", "boundary", "control", "gradients"}
    predicted = {row["category"]: row["predicted"] for row in rank["memory"]}
    assert predicted["parameters"] == next(row["measured"] for row in rank["memory"] if row["category"] == "parameters")
    assert CollectiveRow(**rank["collectives"][0]).count > 0
    assert cli.main(["dryrun", str(path), "--model", "llama-tiny", "--rank", "8"]) == 2
    assert "rank 8 is outside" in capsys.readouterr().err
