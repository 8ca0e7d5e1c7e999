"""Field cases of kind planner-solver: a search that scales, survives its solver, and states what a time limit cost."""

from __future__ import annotations

import time
from dataclasses import replace

import pulp
import pytest
import torch
from torch import Tensor, nn

from autopar.api import find_plan
from autopar.cost_model import solver_backends
from autopar.cost_model.search import SearchResult, search
from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from tests import models

TRAIN = TrainSpec(global_batch=64, seq_len=16)


def gpt_of(layers: int) -> TracedModel:
    with torch.device("meta"):
        model = models.TinyGPT(layers=layers)
    return prepare(trace(model, models.default_batch()))


@pytest.fixture(scope="module")
def deep() -> TracedModel:
    return gpt_of(96)


def cluster_of(devices: int) -> ClusterSpec:
    return preset("dgx-h100", devices // 8)


def plan_of(traced: TracedModel, spec: SearchSpec | None = None) -> tuple[SearchResult, float]:
    started = time.process_time()
    result = search(traced, cluster_of(64), TRAIN, spec=spec)
    return result, time.process_time() - started


def test_ps_03_identical_layers_cost_little(deep: TracedModel) -> None:
    """96 layers take at most 3x the time of 24 (with room for noise) and well under a minute; all get one sharding."""
    few, few_s = plan_of(gpt_of(24))
    many, many_s = plan_of(deep)
    assert many_s < 3 * few_s + 5
    assert many_s < 60
    assert few.statistics["status"] == many.statistics["status"] == "optimal"
    sharded = {key.split(".")[1] for key in (*many.plan.parameters, *many.plan.ops) if key.startswith("blocks.")}
    assert sharded <= {"*"}


@pytest.mark.parametrize("pins", [Pins(), Pins(tp=2), Pins(pp=2), Pins(pp=4)], ids=lambda pins: pins.texts())
def test_ps_03_counting_equal_layers_changes_nothing(pins: Pins) -> None:
    """Four equal layers as one class or as three: equal objective. As four classes it is a little lower: nobody but the
    final norm reads what the last layer makes, so its gradient is not a sum, which the class prices for every layer."""
    traced, cluster = gpt_of(4), preset("local", 4)
    first = min(s.index for s in traced.segments if s.kind == "layer")

    def split(classes: int) -> TracedModel:
        groups = {s.index: min(s.index - first, classes - 1) for s in traced.segments if s.kind == "layer"}
        return replace(
            traced,
            segments=tuple(replace(s, class_id=f"layer {groups[s.index]}") if s.index in groups else s
                           for s in traced.segments),
        )  # fmt: skip

    one, three, four = (search(split(n), cluster, TRAIN, pins).plan.prediction["step_time_s"] for n in (1, 3, 4))
    assert three == pytest.approx(one, rel=1e-9)
    assert one * 0.985 <= four < one


class _Twins(nn.Module):
    """A block whose projections are called a_1.b and a.1_b: one name, once dots become underscores."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a_1, self.a = nn.Module(), nn.Module()
        self.a_1.b = nn.Linear(dim, 4 * dim)
        self.a.add_module("1_b", nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        out = self.a.get_submodule("1_b")(torch.relu(self.a_1.b(x)))
        assert isinstance(out, Tensor)
        return x + out


class _TwinModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([_Twins(32) for _ in range(2)])
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_ps_04_names_that_collide_do_not_matter(solver: str) -> None:
    plan = find_plan(
        _TwinModel(), preset("local", 2), TRAIN, example=models.default_batch(), pins=Pins(tp=2),
        search=SearchSpec(solver=solver),
    ).plan  # fmt: skip
    assert {"layers.*.a_1.b.weight", "layers.*.a.1_b.weight"} <= set(plan.parameters)


def test_ps_04_without_any_solver_the_plan_is_stated_with_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, cluster = gpt_of(4), preset("local", 4)
    best = search(traced, cluster, TRAIN, Pins(tp=2))
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    monkeypatch.setattr(solver_backends, "cbc_path", lambda: None)
    result = search(traced, cluster, TRAIN, Pins(tp=2))
    found_s, best_s = (r.plan.prediction["step_time_s"] for r in (result, best))
    assert best_s * (1 - 1e-9) <= found_s <= best_s * 1.05
    assert result.statistics["solver"] == "heuristic"
    assert result.statistics["bound_s"] <= best_s * (1 + 1e-9)
    assert found_s <= result.statistics["bound_s"] * (1 + result.statistics["gap"]) * (1 + 1e-9)
    assert any("pip install highspy" in note for note in result.notices)


def test_ps_06_a_time_limit_returns_a_plan_and_its_gap(deep: TracedModel) -> None:
    best, _ = plan_of(deep)
    limited, _ = plan_of(deep, SearchSpec(time_limit_s=1e-3))
    assert best.statistics["gap"] <= 1e-6
    bound_s, gap = limited.statistics["bound_s"], limited.statistics["gap"]
    step_s, best_s = (r.plan.prediction["step_time_s"] for r in (limited, best))
    assert bound_s <= best_s * (1 + 1e-9) <= step_s * (1 + 2e-9)
    assert gap == pytest.approx(step_s / bound_s - 1)
    assert limited.statistics["status"] == ("optimal" if gap <= 1e-6 else "incumbent")
    assert limited.statistics["solved"] < best.statistics["solved"]
    assert {"variables", "constraints"} <= set(limited.statistics)
    assert any("time limit of 0.001 s" in note for note in limited.notices)
