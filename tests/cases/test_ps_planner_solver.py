"""Field cases of kind planner-solver: a search that scales, survives its solver, and states what a time limit cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pulp
import pytest
import torch
from torch import Tensor, nn

from autopar.api import find_plan
from autopar.cost_model import solver_backends, stage_cuts
from autopar.cost_model.search import search
from autopar.cost_model.search_result import SearchResult
from autopar.errors import InfeasiblePlanError, UnsupportedModelError
from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.plan import Plan, match_path
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


def plan_of(traced: TracedModel, spec: SearchSpec | None = None) -> SearchResult:
    return search(traced, cluster_of(64), TRAIN, spec=spec)


def _planned_and_counted(traced: TracedModel) -> tuple[SearchResult, int]:
    """And how many shortest paths over stages and layers it took: what grows with the layers, if anything does."""
    with mock.patch.object(stage_cuts, "_shortest", wraps=stage_cuts._shortest) as shortest:
        return plan_of(traced), shortest.call_count


def test_ps_03_identical_layers_cost_little(deep: TracedModel) -> None:
    """96 layers are as many integer programmes as 24, of the same size, and hardly more cuts; all get one sharding."""
    few, few_paths = _planned_and_counted(gpt_of(24))
    many, many_paths = _planned_and_counted(deep)
    assert many.statistics["ilps"] <= few.statistics["ilps"]
    assert many.statistics["variables"] <= few.statistics["variables"]
    assert many_paths <= 3 * few_paths
    assert few.statistics["status"] == many.statistics["status"] == "optimal"
    sharded = {key.split(".")[1] for key in (*many.plan.parameters, *many.plan.ops) if key.startswith("blocks.")}
    assert sharded <= {"*"}


@pytest.mark.parametrize("texts", [(), ("tp=2",), ("pp=2",), ("pp=4",)], ids=",".join)
def test_ps_03_counting_equal_layers_changes_nothing(texts: tuple[str, ...]) -> None:
    """Four equal layers as one class or as three: equal objective. As four classes it is a little lower: nobody but the
    final norm reads what the last layer makes, so its gradient is not a sum, which the class prices for every layer."""
    traced, cluster = gpt_of(4), preset("local", 4)
    pins = Pins.parse([*texts, "virtual_stages=1"])  # several chunks a rank need layers of one class
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


class _Named(nn.Module):
    """Blocks under these paths, and in the folder of the first a module that is none of them."""

    def __init__(self, paths: Sequence[str] = ("layers.0", "layers.1")) -> None:
        super().__init__()
        self.embed, self.head, self.paths = nn.Embedding(64, 32), nn.Linear(32, 64), paths
        self.layers = nn.ModuleDict()
        self.layers["last"] = nn.Linear(32, 32)
        for path in paths:
            folder, _, name = path.rpartition(".")
            self.get_submodule(folder).add_module(name, _Twins(32))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for path in self.paths:
            x = self.get_submodule(path)(x)
        return nn.functional.cross_entropy(self.head(self.layers["last"](x)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_ps_04_names_that_collide_do_not_matter(solver: str) -> None:
    plan = find_plan(
        _Named(), preset("local", 2), TRAIN, example=models.default_batch(), pins=Pins(tp=2),
        search=SearchSpec(solver=solver),
    ).plan  # fmt: skip
    assert {"layers.0-1.a_1.b.weight", "layers.0-1.a.1_b.weight"} <= set(plan.parameters)


@pytest.mark.parametrize(
    "paths",
    [("layers.00", "layers.01", "layers.02"), ("layers.08", "layers.09", "layers.10"), ("0", "1", "2"),
     ("layers.0", "layers.2", "layers.7"), ("layers.a 1", "layers.a_1", "layers.a-1")],
    ids="/".join,
)  # fmt: skip
def test_ps_04_neighbour_a_plan_names_the_layers_as_the_model_does(paths: Sequence[str]) -> None:
    """Every weight of every layer is sharded as it was priced, none that is no layer's is; stages hold these layers."""
    traced = prepare(trace(_Named(paths), models.default_batch()))
    plan = search(traced, preset("local", 6), TRAIN, Pins(tp=2, pp=3, checkpoint="full", virtual_stages=1)).plan
    plan = Plan.loads(plan.dumps())
    assert [path for stage in plan.layer_paths() for path in stage] == list(paths)
    assert {plan.checkpoint_mode(path) for path in paths} == {"full"}
    inside = ("a_1.b.weight", "a_1.b.bias", "a.1_b.weight", "a.1_b.bias")
    for name in inside[:3]:
        assert len({str(plan.parameter_placement(f"{path}.{name}")) for path in paths} - {"R"}) == 1
    names = {f"{path}.{name}" for path in paths for name in inside}
    others = {"embed.weight", "head.weight", "head.bias", "layers.last.weight", "layers.last.bias"}
    assert set(traced.parameters) == names | others
    for pattern in plan.parameters:
        matched = {name for name in (names | others) if match_path(pattern, name)}
        assert matched <= names or matched == {pattern}, f"{pattern} takes in what is no layer's"


@pytest.mark.parametrize("name", ["*", "0-3"])
def test_ps_04_neighbour_a_name_that_plans_read_as_a_pattern_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"layers.{re.escape(name)}.a_1.b.weight: .*pattern"):
        trace(_Named((f"layers.{name}", "layers.4")), models.default_batch())


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


def small_cluster(memory_bytes: float, devices: int = 2) -> ClusterSpec:
    local = preset("local", devices)
    return replace(local, device=replace(local.device, memory_bytes=int(memory_bytes), reserved_bytes=0))


@pytest.fixture(scope="module")
def llama() -> TracedModel:
    return prepare(trace(models.llama_tiny(), models.default_batch()))


_REFUSED: dict[str, InfeasiblePlanError] = {}


def refusal(traced: TracedModel, cluster: ClusterSpec, pins: Pins, train: TrainSpec = TRAIN) -> InfeasiblePlanError:
    """Searched for once: several tests start from the least memory under the same pins."""
    key = f"{traced.fingerprint} {cluster} {pins} {train}"
    if key not in _REFUSED:
        with pytest.raises(InfeasiblePlanError) as caught:
            search(traced, cluster, train, pins)
        _REFUSED[key] = caught.value
    return _REFUSED[key]


def needed_bytes(error: InfeasiblePlanError, given: int) -> int:
    return given + int(re.findall(r"lacks (\d+) bytes", error.what)[0])


@pytest.mark.parametrize("given", [1024, 0.9])
@pytest.mark.parametrize(
    "pins", [Pins(), Pins(tp=2), Pins(pp=2, microbatch=2)], ids=lambda pins: ",".join(pins.texts())
)
def test_ps_01_too_little_memory_names_what_would_do(llama: TracedModel, given: float, pins: Pins) -> None:
    """1 kB, and 90 % of the minimum: the stage, the bytes by category, a memory that is enough and the plan on it."""
    least = needed_bytes(refusal(llama, small_cluster(1024), pins), 1024)
    memory_bytes = 1024 if given == 1024 else int(given * least)
    error = refusal(llama, small_cluster(memory_bytes), pins)
    assert error.where == "memory"
    assert needed_bytes(error, memory_bytes) == pytest.approx(least, abs=2)
    for word in ("on stage", "parameters", "gradients", "optimizer", "activations", "micro-batch"):
        assert word in error.what
    assert "devices of at least" in error.try_
    assert isinstance(error.nearest_plan, Plan)
    enough = search(llama, small_cluster(least + 2), TRAIN, pins).plan
    assert error.nearest_plan.degrees == enough.degrees
    assert error.nearest_plan.prediction["step_time_s"] >= enough.prediction["step_time_s"] * (1 - 1e-9)
    assert refusal(llama, small_cluster(least - 64), pins)


def test_ps_01_more_devices_that_would_do_are_named(llama: TracedModel) -> None:
    least = needed_bytes(refusal(llama, small_cluster(1024), Pins()), 1024)
    error = refusal(llama, small_cluster(0.9 * least), Pins())
    (count,) = re.findall(r"(\d+) of these devices", error.try_)
    assert search(llama, small_cluster(0.9 * least, int(count)), TRAIN).plan.degrees.world_size == int(count)
    assert refusal(llama, small_cluster(0.9 * least, int(count) // 2), Pins())


def test_ps_01_no_number_of_devices_is_named_where_none_is_enough(llama: TracedModel) -> None:
    assert "of these devices" not in refusal(llama, small_cluster(1024), Pins()).try_


def test_ps_01_a_batch_that_does_not_divide(llama: TracedModel) -> None:
    error = refusal(llama, preset("local", 2), Pins(tp=1, pp=1, cp=1), TrainSpec(global_batch=3, seq_len=16))
    assert "divide the global batch 3" in error.what
    assert "multiple of 2" in error.try_


def test_ps_02_the_pin_to_blame_is_named(llama: TracedModel) -> None:
    """The embedding pinned replicated, and memory just below what that allows; the order of pins changes nothing."""
    texts = ["tp=2", "model.embed_tokens=replicate"]
    pinned = Pins.parse(texts)
    with_pin = needed_bytes(refusal(llama, small_cluster(1024), pinned), 1024)
    without = needed_bytes(refusal(llama, small_cluster(1024), Pins(tp=2)), 1024)
    assert without < with_pin
    memory_bytes = with_pin - 8
    error = refusal(llama, small_cluster(memory_bytes), pinned)
    assert "the pin model.embed_tokens=replicate is to blame" in error.what
    assert "the pin tp=2 is to blame" not in error.what or without > memory_bytes
    assert re.search(r"lacks [78] bytes", error.what)
    _REFUSED.clear()
    assert str(refusal(llama, small_cluster(memory_bytes), Pins.parse(reversed(texts)))) == str(error)
    assert search(llama, small_cluster(memory_bytes), TRAIN, Pins(tp=2)).plan.degrees.tp == 2


def test_ps_06_a_time_limit_returns_a_plan_and_its_gap(deep: TracedModel) -> None:
    best = plan_of(deep)
    limited = plan_of(deep, SearchSpec(time_limit_s=1e-3))
    assert best.statistics["gap"] <= 1e-6
    bound_s, gap = limited.statistics["bound_s"], limited.statistics["gap"]
    step_s, best_s = (r.plan.prediction["step_time_s"] for r in (limited, best))
    assert bound_s <= best_s * (1 + 1e-9) <= step_s * (1 + 2e-9)
    assert gap == pytest.approx(step_s / bound_s - 1)
    assert limited.statistics["status"] == ("optimal" if gap <= 1e-6 else "incumbent")
    assert limited.statistics["solved"] < best.statistics["solved"]
    assert {"variables", "constraints"} <= set(limited.statistics)
    assert any("the time limit ended the search" in note for note in limited.notices)
