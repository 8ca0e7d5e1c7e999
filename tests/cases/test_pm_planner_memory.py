"""pm-01, pm-02, pm-03, pm-05: memory by stage and category, in flight, and where the constants come from."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from autopar import passes
from autopar.api import find_plan
from autopar.cost_model.constant_table import load_constants
from autopar.cost_model.moments import in_flight
from autopar.cost_model.search_result import SearchResult
from autopar.dryrun import dry_run_captured
from autopar.errors import InfeasiblePlanError
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.reports.constants import constants_text
from autopar.reports.tables import MEMORY_NAMES
from autopar.reports.text import render
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from tests import models, plans

EMBEDDING, LAYER, NORM, HEAD = 2048, 9280, 32, 2048
"""Parameters of the case's Llama: 41248 in all."""

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "reserved")


@pytest.fixture(scope="module")
def llama() -> TracedModel:
    return passes.prepare(trace(models.llama_tiny(torch.float32), models.default_batch()))


def _plan_of(model: str, **pins: Any) -> SearchResult:
    cluster = ClusterSpec.preset("local", nodes=pins.get("dp", 1) * pins.get("pp", 1))
    built = getattr(models, model)(dtype=torch.float32)
    train = TrainSpec(global_batch=8, seq_len=16, precision="fp32")
    return find_plan(built, cluster, train, example=models.default_batch(), pins=Pins(**pins))


def test_pm_01_the_heaviest_stage_counts(llama: TracedModel) -> None:
    """Stages of 1, 2 and 1 layers hold 11328, 18560 and 11360 parameters; the mean is 26 % too low."""
    layers = [segment.path for segment in llama.layers]
    plan = Plan(degrees=Degrees(pp=3), global_batch=8, seq_len=16, micro_batch=1, precision="fp32",
                stages=((layers[0],), (layers[1], layers[2]), (layers[3],)))  # fmt: skip
    result = dry_run_captured(plan, llama)
    held = [rank.parameters for rank in result.ranks]
    assert held == [EMBEDDING + LAYER, 2 * LAYER, LAYER + NORM + HEAD] == [11328, 18560, 11360]
    static = [{row.category: row.measured for row in rank.memory} for rank in result.ranks]
    assert max(static, key=lambda memory: memory["parameters"])["parameters"] == 4 * 18560


def test_pm_01_feasibility_is_that_of_the_heaviest_stage() -> None:
    """Four layers on four stages are cut in one way; memory for the mean stage alone is not enough."""
    pins = {"pp": 4, "checkpoint": "none", "microbatch": 1, "schedule": "1f1b"}
    plan = _plan_of("llama_tiny", **pins).plan
    totals = [dict(stage)["total"] for stage in plan.prediction["peak_memory_bytes"]]
    mean = sum(totals) / len(totals)
    assert max(totals) > mean
    cluster = ClusterSpec.preset("local", nodes=4)
    limit = int((max(totals) + mean) / 2)
    small = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory_bytes=limit))
    with pytest.raises(InfeasiblePlanError, match="stage"):
        find_plan(models.llama_tiny(torch.float32), small, TrainSpec(global_batch=8, seq_len=16, precision="fp32"),
                  example=models.default_batch(), pins=Pins(**pins))  # fmt: skip


def test_pm_02_categories_are_listed_separately() -> None:
    """fp32 AdamW takes 16 bytes a parameter on one device: 4 weights, 4 gradients, 8 moments; all there at the peak
    where a second micro-batch finds the gradients of the first."""
    result = _plan_of("gpt2_tiny", checkpoint="none", microbatch=1)
    (memory,) = (dict(stage) for stage in result.plan.prediction["peak_memory_bytes"])
    static = [memory[name] for name in ("parameters", "gradients", "optimizer")]
    assert static == [4 * 54976, 4 * 54976, 8 * 54976]
    assert sum(static) == 879616
    assert set(CATEGORIES) <= set(memory)
    assert memory["total"] == pytest.approx(sum(memory[name] for name in CATEGORIES), abs=8)
    text = render(result.plan, result)
    shown = (name for name in CATEGORIES if memory[name])
    assert all(MEMORY_NAMES.get(name, name) in text for name in shown)


def test_pm_02_sharded_optimizer_state_over_two() -> None:
    """Measured: half the moments a rank, but for at most one padding element a tensor."""
    traced = passes.prepare(trace(models.gpt2_tiny(torch.float32), models.default_batch()))
    plan = plans.megatron("gpt2", Degrees(dp=2), precision="fp32").replace(zero=1)
    rank = dry_run_captured(plan, traced, [0]).ranks[0]
    held = {row.category: row.measured for row in rank.memory}
    tensors = len(traced.parameters)
    assert 8 * 54976 / 2 <= held["optimizer"] <= 8 * 54976 / 2 + tensors * (8 + 4)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "expected"),
    [("1f1b", 8, [4, 3, 2, 1]), ("1f1b", 2, [2, 2, 2, 1]), ("gpipe", 8, [8, 8, 8, 8])],
)
def test_pm_03_micro_batches_in_flight(schedule: str, micro_batches: int, expected: list[int]) -> None:
    assert [in_flight(schedule, s, 4, micro_batches) for s in range(4)] == expected


def test_pm_03_neighbour_what_a_rank_really_holds(llama: TracedModel) -> None:
    """On the first of four equal stages 1F1B holds 4 micro-batches where GPipe holds 8. GPipe's peak is its first
    backward; 1F1B's a later one, which adds to gradients and holds those of a layer, here as much as a micro-batch."""

    def held(schedule: str, global_batch: int = 8) -> int:
        plan = plans.megatron("llama", Degrees(pp=4), schedule=schedule, precision="fp32")
        memory = dry_run_captured(plan.replace(global_batch=global_batch), llama, [0]).ranks[0].memory
        return next(row.measured for row in memory if row.category == "activations")

    one = held("gpipe", 8) - held("gpipe", 7)
    assert 2.9 * one < held("gpipe") - held("1f1b") < 4.1 * one


def test_pm_05_every_constant_states_where_it_comes_from() -> None:
    table = load_constants()
    assert all(constant.origin and constant.unit for constant in table)
    said = {constant.origin.split(";")[0].split(",")[0] for constant in table}
    assert any(text.startswith("fit") for text in said)
    assert any("data sheet" in text for text in said)


def test_pm_05_the_report_prints_each_constant_with_its_origin() -> None:
    cluster = ClusterSpec.parse("dgx-b200:2")
    text = constants_text(cluster, 1000)
    behind = load_constants().behind(cluster.device)
    assert {"matmul_16bit", "power_derate", "fragmentation", "context_bytes"} <= {c.name for c in behind}
    assert {c.generation for c in behind} == {"", "blackwell", "b200"}
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert all(f"{c.value:.4g}" in rows[c.name] and rows[c.name].endswith(c.origin) for c in behind)
