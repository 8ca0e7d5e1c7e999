"""Field cases of kind heterogeneous: stages on unequal devices, sized to their speed and memory."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.cost_model.mixed_search import MixedRun
from autopar.cost_model.mixed_stages import MixedTable
from autopar.cost_model.mode_mixes import LayerClass, LayerMode
from autopar.cost_model.objectives import search_for
from autopar.cost_model.pipeline_ilp import PipelineSolution, prove_table, solve_table, step_time
from autopar.cost_model.pipeline_problem import Moment, PipelineProblem, StageCost
from autopar.cost_model.search import Run
from autopar.cost_model.stage_table import StageTable
from autopar.errors import InfeasiblePlanError, SpecError
from autopar.hardware import DEVICES, preset
from autopar.ir import TracedModel
from autopar.mixed_cluster import as_slowest, mixed_cluster
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.reports.text import render
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, DeviceSpec, GroupSpec, LinkSpec, Pins, StackSpec, TrainSpec
from autopar.trace import trace
from tests import models

TRAIN = TrainSpec(global_batch=16, seq_len=64)
LINK = LinkSpec(name="between", span=2, bandwidth=1e9, latency=1e-5)


def problem(layer_s: float, memory_bytes: float, layers: int, stages: int) -> PipelineProblem:
    """Equal layers, nothing else."""
    mode = LayerMode("none", layer_s, 0.0)
    costs = tuple(StageCost() for _ in range(stages))
    return PipelineProblem((0,) * layers, (LayerClass((mode,), 1.0),), costs, 8, memory_bytes)


def split(speeds: list[float], memories: list[float], layers: int = 9) -> list[int] | None:
    """Layers of each stage, a device a stage; a layer takes 1 / speed seconds."""
    stages = len(speeds)
    tables = [StageTable(problem(1 / v, m, layers, stages)) for v, m in zip(speeds, memories, strict=True)]
    found = solve_table(MixedTable(tables, range(stages)))
    return [j - i for i, j in found.runs] if isinstance(found, PipelineSolution) else None


@pytest.mark.parametrize(
    ("speeds", "memories", "expected"),
    [
        ([2, 1], [99, 99], [6, 3]),  # the case: slowest stage 3.0 units
        ([1, 2], [99, 99], [3, 6]),
        ([2, 1], [5, 99], [5, 4]),  # memory proportional to neither speed nor layers
        ([2, 1], [99, 2], [7, 2]),
        ([2, 1], [4, 5], [4, 5]),
        ([2, 1], [4, 4], None),
        ([3, 2, 1], [99, 99, 99], [5, 3, 1]),
    ],
)
def test_ht_01_layers_by_speed_and_memory(speeds: list[float], memories: list[float], expected: list[int]) -> None:
    found = split(speeds, memories)
    assert found == expected
    if expected == [6, 3]:
        assert max(n / v for n, v in zip(found, speeds, strict=True)) == 3.0


def test_ht_01_optimal_on_random_groups() -> None:
    """Against every cut of every instance; recomputation and memory differ by group, and the ILP agrees."""
    feasible = with_ilp = 0
    for seed in range(60):
        rng = random.Random(seed)
        layers, stages = rng.randint(3, 8), rng.randint(2, 3)
        groups = [_random_problem(rng, layers, stages) for _ in range(2)]
        owner = [rng.randrange(2) for _ in range(stages)]
        table = MixedTable([StageTable(g) for g in groups], owner)
        expected = _brute_force(groups, owner, layers)
        found = solve_table(table)
        if expected is None:
            assert not isinstance(found, PipelineSolution)
            continue
        assert isinstance(found, PipelineSolution)
        assert found.step_s == pytest.approx(expected, rel=1e-9)
        with_ilp += prove_table(table, found).variables > 0
        feasible += 1
    assert feasible > 30
    assert with_ilp > 5


def _random_problem(rng: random.Random, layers: int, stages: int) -> PipelineProblem:
    t = rng.uniform(0.5, 2)
    modes = (LayerMode("none", t, 3.0, 0.5), LayerMode("full", 1.3 * t, 0.4, 3.0))
    costs = tuple(StageCost(rng.uniform(0, 1), rng.uniform(0, 2), 0.0, (Moment(stages - s),)) for s in range(stages))
    tail = rng.uniform(0, 1)
    return PipelineProblem((0,) * layers, (LayerClass(modes, 1.0),), costs, 6, rng.uniform(6, 25),
                           lambda stage, counts: tail * counts[0])  # fmt: skip


def _brute_force(groups: list[PipelineProblem], owner: list[int], layers: int) -> float | None:
    tables, best = [StageTable(g) for g in groups], None
    for cuts in itertools.combinations(range(1, layers), len(owner) - 1):
        borders = [0, *cuts, layers]
        numbers = [tables[0].number(i, j) for i, j in itertools.pairwise(borders)]
        priced = [tables[g].price(s, n) for s, (g, n) in enumerate(zip(owner, numbers, strict=True))]
        if all(priced):
            value = step_time([p for p in priced if p is not None], groups[0].micro_batches)
            best = value if best is None else min(best, value)
    return best


def cpu(speed: float = 1.0, memory_bytes: int = 4 << 30) -> DeviceSpec:
    own = DEVICES["cpu"]
    return replace(
        own, flops={name: speed * rate for name, rate in own.flops.items()}, memory_bytes=memory_bytes,
        memory_bandwidth=speed * own.memory_bandwidth, launch_s=own.launch_s / speed, reserved_bytes=0,
    )  # fmt: skip


def groups_of(*devices: DeviceSpec, each: int = 1, link: LinkSpec = LINK) -> ClusterSpec:
    inner = (replace(link, span=each),) if each > 1 else ()
    named = tuple(GroupSpec(name=f"g{i}", device=d, num_devices=each, links=inner) for i, d in enumerate(devices))
    return mixed_cluster("mixed", named, link, StackSpec())


@pytest.fixture(scope="module")
def gpt() -> TracedModel:
    with torch.device("meta"):
        model = models.TinyGPT(layers=9, dim=256, heads=8)
    return prepare(trace(model, models.default_batch()))


def test_ht_01_two_devices_end_to_end(gpt: TracedModel) -> None:
    """Speeds 1 : 2. The plan, its ranks and the report; it beats equal halves, which the notice states."""
    cluster = groups_of(cpu(1), cpu(2))
    result = search_for(gpt, cluster, TRAIN, Pins(pp=2, virtual_stages=1))
    sizes = [len(paths) for paths in result.plan.layer_paths()]
    fast = 0 if result.plan.groups["0"] == "g1" else 1
    assert sizes[fast] in (6, 7)
    assert sum(sizes) == 9
    assert set(result.plan.groups.values()) == {"g0", "g1"}
    prediction = result.plan.prediction
    assert len(prediction["stage_busy"]) == 2
    assert all(0.5 < busy <= 1 for busy in prediction["stage_busy"])
    report = render(result.plan, result, cluster=cluster, notices=result.notices)
    for text in ("ranks of groups", "busy", "g0", "stages on groups:", "all devices as equals"):
        assert text in report
    slow = search_for(gpt, replace(cluster, groups=()), TRAIN, Pins(pp=2, virtual_stages=1))
    assert prediction["step_time_s"] < 0.75 * slow.plan.prediction["step_time_s"]
    assert Plan.loads(result.plan.dumps()) == result.plan


def test_equal_groups_are_planned_as_one_cluster(gpt: TracedModel) -> None:
    """Two groups of two equal devices, one link everywhere: the same step as four equal devices."""
    link = replace(LINK, span=4)
    whole = ClusterSpec(name="four", device=cpu(), num_devices=4, links=(link,))
    for pins in (Pins(pp=2, dp=2), Pins(pp=4), Pins(pp=2, tp=2, checkpoint="full")):
        mixed = search_for(gpt, groups_of(cpu(), cpu(), each=2, link=link), TRAIN, pins)
        equal = search_for(gpt, whole, TRAIN, pins)
        times = [r.plan.prediction["step_time_s"] for r in (mixed, equal)]
        assert times[0] == pytest.approx(times[1], rel=1e-9)
        assert mixed.plan.stages == equal.plan.stages


def test_a_layout_across_the_slow_link_wins_only_by_its_number(gpt: TracedModel) -> None:
    """Devices alike and a fast link between them: dp across it is allowed to win; over a slow link stages are put on
    groups. Both numbers are stated."""
    fast, slow = replace(LINK, bandwidth=1e12, latency=1e-7), replace(LINK, bandwidth=2e7, latency=1e-3)
    near, far = (search_for(gpt, groups_of(cpu(), cpu(), link=link), TRAIN, Pins(cp=1)) for link in (fast, slow))
    assert near.plan.degrees.dp == 2
    assert far.plan.degrees.pp == 2
    for result in (near, far):
        (note,) = [note for note in result.notices if note.startswith("unequal groups")]
        assert note.count("s a step") == 2
        assert list(result.plan.groups) == ["0", "1"]


def test_memory_of_each_group_counts(gpt: TracedModel) -> None:
    """A fast group too small for its share takes fewer layers; if nothing fits anywhere, the search says so."""
    pins = Pins(pp=2, virtual_stages=1, zero=0)
    free = search_for(gpt, groups_of(cpu(1), cpu(2)), TRAIN, pins).plan
    peaks = {owner: stage["total"] for owner, stage in
             zip(free.prediction["stage_group"], free.prediction["peak_memory_bytes"], strict=True)}  # fmt: skip
    tight = search_for(gpt, groups_of(cpu(1), cpu(2, memory_bytes=int(0.8 * peaks["g1"]))), TRAIN, pins).plan
    stage = tight.prediction["stage_group"].index("g1")
    assert tight.prediction["peak_memory_bytes"][stage]["total"] <= 0.8 * peaks["g1"]
    assert tight.prediction["step_time_s"] > free.prediction["step_time_s"]
    with pytest.raises(InfeasiblePlanError, match="no plan fits"):
        search_for(gpt, groups_of(cpu(1, memory_bytes=10_000), cpu(2, memory_bytes=10_000)), TRAIN, pins)


@pytest.mark.parametrize(
    ("memory_mib", "texts", "blamed"),
    [((20, 60), (), set()), ((20, 140), ("pp=1", "zero=0"), {"pp=1"})],
    ids=["free", "pp=1"],
)
def test_what_fits_on_no_groups_is_explained_group_by_group(
    gpt: TracedModel, memory_mib: tuple[int, int], texts: tuple[str, ...], blamed: set[str]
) -> None:
    """How much more of one group would do, others left as they are; the pins to blame; a plan that would run."""
    devices, pins = [cpu(memory_bytes=n << 20) for n in memory_mib], Pins.parse(texts)
    with pytest.raises(
        InfeasiblePlanError, match=r"stages on groups do not fit \(g0 .*All devices as equals"
    ) as caught:
        search_for(gpt, groups_of(*devices), TRAIN, pins)
    error = caught.value
    assert set(re.findall(r"the pin (\S+) is to blame, without it they do", error.what)) == blamed
    for text in blamed:
        assert search_for(gpt, groups_of(*devices), TRAIN, Pins.parse(t for t in texts if t != text))
    for number, unit, group in re.findall(r"([\d.]+) ([MG])iB a device in group g(\d)", error.try_):
        given = float(number) * 2 ** {"M": 20, "G": 30}[unit]
        for part in (1.0, 0.97):
            changed = list(devices)
            changed[int(group)] = cpu(memory_bytes=int(part * given))
            fits = MixedRun(Run(gpt, as_slowest(groups_of(*changed)), TRAIN, pins), groups_of(*changed), SearchSpec())
            assert (fits.first_fit() is not None) is (part == 1.0)
    found = re.findall(r"a device in group (g\d)", error.try_)
    assert bool(found) is not bool(blamed)
    if found:
        assert isinstance(error.nearest_plan, Plan)
        assert set(error.nearest_plan.groups.values()) == {"g0", "g1"}


@pytest.mark.parametrize("speed", [1.0, 2.0], ids=["equals win", "groups win"])
def test_a_plan_is_as_proven_as_both_searches_are(
    gpt: TracedModel, monkeypatch: pytest.MonkeyPatch, speed: float
) -> None:
    """Whichever wins, what the search of the other left open is in the gap, in the plan's too."""
    cluster = groups_of(cpu(), cpu(speed), link=replace(LINK, bandwidth=1e12, latency=1e-7))
    best = search_for(gpt, cluster, TRAIN)
    assert best.statistics["status"] == "optimal"
    step_s, of = best.plan.prediction["step_time_s"], Run if speed == 2.0 else MixedRun
    whole = of.result
    monkeypatch.setattr(of, "result", lambda run: whole(run).against(0.8 * step_s))
    left_open = search_for(gpt, cluster, TRAIN)
    assert left_open.plan.degrees == best.plan.degrees
    assert left_open.statistics["bound_s"] == pytest.approx(0.8 * step_s)
    assert left_open.statistics["gap"] == left_open.plan.solver["gap"] == pytest.approx(0.25)
    assert left_open.statistics["status"] == left_open.plan.solver["status"] == "incumbent"


def test_devices_as_equals_have_the_least_room_of_any() -> None:
    """Not the least memory less the most that is reserved, which no device has: here it would be nothing."""
    small, large = cpu(memory_bytes=3 << 30), replace(cpu(memory_bytes=80 << 30), reserved_bytes=4 << 30)
    device = as_slowest(groups_of(small, large)).device
    assert device.memory_bytes - device.reserved_bytes == 3 << 30


def test_groups_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(
        '[[group]]\nname = "new"\ncluster = "dgx-h100:1"\n[[group]]\nname = "old"\ncluster = "dgx-a100-40g:2"\n'
        '[[link]]\nname = "lan"\nbandwidth = "100Gb/s"\nlatency = "10us"\n'
    )
    cluster = ClusterSpec.load(path)
    assert cluster.num_devices == 24
    assert [g.num_devices for g in cluster.groups] == [8, 16]
    assert cluster.device.memory_bytes == preset("dgx-a100-40g").device.memory_bytes
    assert [(link.span, link.name) for link in cluster.links] == [(8, "nvlink"), (24, "lan")]
    assert cluster.links[-1].bandwidth == 12.5e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[group]]\ncluster = "dgx-h100:1"\n[[link]]\nbandwidth = 1\nlatency = "1us"\n', "1 groups. Try: 2 to 4"),
        ('[[group]]\nname = "a"\ncluster = "dgx-h100"\n' * 2, "one \\[\\[link\\]\\] joins the groups, there are 0"),
        ('[[group]]\nname = "a"\ncluster = "dgx-h100"\n' * 2 + '[[link]]\nbandwidth = 1\nlatency = "1us"\n',
         "two groups have one name: a, a"),
        ('[[group]]\ncluster = "dgx-h99"\n', "unknown cluster preset 'dgx-h99'"),
        ('[[group]]\ncluster = "dgx-h100"\ndevices = 8\n', "a group is a preset, or a device with links"),
        ("[[group]]\ndevices = 8\n", "group 1: neither a preset nor a device"),
        ('[[group]]\nname = "a"\ncluster = "dgx-h100"\n[[group]]\nname = "b"\ncluster = "dgx-a100-40g"\n'
         '[[link]]\nspan = 8\nbandwidth = 1\nlatency = "1us"\n', "spans 8 devices, the groups have 16. Try: span = 16"),
        ('[[group]]\ncolor = "red"\n', "unknown key 'color'"),
        ("group = 3\n", "must be a list of tables"),
    ],
)  # fmt: skip
def test_bad_groups_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        ClusterSpec.load(path)


def test_other_objectives_need_equal_devices(gpt: TracedModel) -> None:
    with pytest.raises(SpecError, match="the objective memory needs equal devices"):
        search_for(gpt, groups_of(cpu(1), cpu(2)), TRAIN, spec=SearchSpec(objective="memory"))
