"""The pipeline ILP against brute force, and the field cases on its level."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from autopar.cost_model.mode_mixes import LayerClass, LayerMode, class_mixes, frugal
from autopar.cost_model.pipeline_ilp import PipelineSolution, prove, solve_pipeline, step_time
from autopar.cost_model.pipeline_problem import Moment, PipelineProblem, StageCost, StagePrice
from autopar.cost_model.stage_table import StageTable, price_stage


def equal_layers(layers: int, stages: int, head_s: float = 0.0, micro_batches: int = 8) -> PipelineProblem:
    mode = LayerMode("none", 1.0, 0.0)
    costs = [StageCost() for _ in range(stages - 1)] + [StageCost(time_s=head_s)]
    return PipelineProblem((0,) * layers, (LayerClass((mode,), 0.0),), tuple(costs), micro_batches, 1e9)


def solved(problem: PipelineProblem) -> PipelineSolution | None:
    found = solve_pipeline(problem)
    return None if isinstance(found, float) else prove(problem, found)


def sizes(solution: PipelineSolution | None) -> list[int]:
    assert solution is not None
    return [j - i for i, j in solution.runs]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(26, 4, [7, 7, 6, 6]), (9, 2, [5, 4]), (11, 3, [4, 4, 3]), (5, 4, [2, 1, 1, 1]), (4, 3, [2, 1, 1])],
)
def test_layers_that_do_not_divide_are_all_kept(layers: int, stages: int, expected: list[int]) -> None:
    """Field case ppp-01: every layer exactly once and in order."""
    solution = solved(equal_layers(layers, stages))
    assert sorted(sizes(solution), reverse=True) == expected
    assert solution is not None
    assert [i for run in solution.runs for i in range(*run)] == list(range(layers))


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    """Field case ppp-02: slowest stage 3, not 4."""
    solution = solved(equal_layers(8, 4, head_s=2.0))
    assert solution is not None
    assert max(s.time_s for s in solution.stages) == 3.0
    assert sizes(solution)[-1] == 1


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="5 stages for 4 layers"):
        solve_pipeline(equal_layers(4, 5))


def random_problem(seed: int) -> PipelineProblem:
    """Up to 7 layers of up to 3 classes, 4 stages, 4 modes, segments, chunks and put-off backwards."""
    rng = random.Random(seed)
    classes = rng.randint(1, 3)
    layers = tuple(rng.randrange(classes) for _ in range(rng.randint(3, 7)))
    uniform = len(set(layers)) == 1
    stages = rng.randint(1, min(4, len(layers)))
    chunks = rng.choice([1, 1, 2]) if 2 * stages <= len(layers) and stages > 1 else 1
    rates = []
    for _ in range(classes):
        t, w = rng.uniform(0.5, 2), rng.uniform(1, 4)
        none = LayerMode("none", t, w, rng.uniform(0, 1))
        some = LayerMode("selective", t * rng.uniform(1.0, 1.2), w * rng.uniform(0.5, 0.9), rng.uniform(0, 2))
        full = LayerMode("full", t * rng.uniform(1.1, 1.4), w * rng.uniform(0.0, 0.3), w + rng.uniform(0, 1))
        modes = rng.choice([(none, some, full), (none, full), (none,), (full,), (some, full)])
        rates.append(LayerClass(modes, rng.uniform(0, 2), rng.choice([0.0, 0.3 * t]), w, rng.uniform(0, 1)))
    m = rng.choice([1, 2, 5, 16])
    costs = tuple(
        StageCost(*(rng.uniform(0, most) for most in (1, 2, 1)), random_moments(rng, min(m, stages - s), chunks))
        for s in range(stages)
    )  # fmt: skip
    weights = [rng.uniform(0, 1) for _ in rates]
    return PipelineProblem(
        layers, tuple(rates), costs, m, rng.uniform(8, 40),
        lambda s, counts: 0.3 * s + sum(w * n for w, n in zip(weights, counts, strict=True)),
        chunks, 1 if chunks > 1 and not uniform else rng.choice([1, 2, 3]),
    )  # fmt: skip


def ranks_of(problem: PipelineProblem, sizes: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """The classes of the layers in every chunk of every rank; chunk k of rank r is stage k p + r of the model."""
    v, p = problem.virtual_stages, len(sizes)
    ranks: list[list[tuple[int, ...]]] = [[] for _ in sizes]
    start = 0
    for chunk in range(v):
        for rank in range(p):
            number = sizes[rank] // v + (chunk < sizes[rank] % v)
            ranks[rank].append(problem.layers[start : start + number])
            start += number
    return ranks


def random_moments(rng: random.Random, flight: int, chunks: int) -> tuple[Moment, ...]:
    """Before any gradient, when all are there, at an end, and late with less in flight."""
    excess = (0.0, rng.uniform(0, flight / 2)) if chunks == 2 else (0.0,)
    return (
        Moment(flight, 0, {"logits": rng.uniform(0, 2)}, False, excess),
        Moment(max(0, flight - rng.choice([0, 1])), 1, {"gradients": rng.uniform(0, 1)}, True, excess),
        Moment(flight - 1 / chunks, 1, {"gradients": 2.0, "activations": rng.uniform(0, 8)}, False, excess),
    )[: rng.choice([2, 3])]


def brute_force(problem: PipelineProblem) -> float | None:
    """Every cut and every mode of every layer. Several chunks of several classes: ranks between the first and the last
    hold the same number of layers, or the earlier ones one more."""
    total, p, v = len(problem.layers), len(problem.stages), problem.virtual_stages
    best = None
    for cuts in itertools.combinations(range(1, total), p - 1):
        sizes = tuple(j - i for i, j in itertools.pairwise([0, *cuts, total]))
        between = sizes[1:-1]
        even = not between or (list(between) == sorted(between, reverse=True) and between[0] - between[-1] <= 1)
        if min(sizes) < v or (v > 1 and not problem.is_uniform and not even):
            continue
        priced = [_brute_stage(problem, s, chunks) for s, chunks in enumerate(ranks_of(problem, sizes))]
        if all(priced):
            value = step_time([x for x in priced if x], problem.micro_batches, v)
            best = value if best is None else min(best, value)
    return best


def _brute_stage(problem: PipelineProblem, s: int, chunks: list[tuple[int, ...]]) -> StagePrice | None:
    """The modes of a stage's layers one by one; time and memory written out anew."""
    own, best, v = problem.stages[s], None, len(chunks)
    layers = [c for chunk in chunks for c in chunk]
    counts = tuple(layers.count(c) for c in range(len(problem.classes)))
    for modes in itertools.product(*(problem.classes[c].modes for c in layers)):
        time_s = own.time_s + sum(mode.time_s for mode in modes)
        kept, working = 0.0, 0.0
        whole = [(c, mode) for c, mode in zip(layers, modes, strict=True) if mode.name == "full"]
        for mode in (mode for mode in modes if mode.name != "full"):
            kept, working = kept + mode.saved_bytes, max(working, mode.transient_bytes)
        if problem.segment > 1 and not problem.is_uniform and any(m.name != "full" for m in modes[: len(whole)]):
            continue  # those recomputed whole are the first ones
        each = [len(whole) // v + (i < len(whole) % v) for i in range(v)]
        for number in each:
            mine, whole = whole[:number], whole[number:]
            for start in range(0, number, problem.segment):
                segment = mine[start : start + problem.segment]
                kept += segment[0][1].saved_bytes
                held = sum(problem.classes[c].whole_bytes for c, _ in segment)
                beside = max(mode.transient_bytes - problem.classes[c].whole_bytes for c, mode in segment)
                working = max(working, held + beside)
        static = own.static_bytes + sum(problem.classes[c].static_bytes for c in layers)
        gradients = sum(problem.classes[c].gradient_bytes for c in layers)
        memory = static + max(
            at.in_flight * (own.saved_bytes + kept) + at.excess[len(layers) % len(at.excess)] * kept / len(layers)
            + at.gradients * gradients + sum(at.beside.values()) + (working if at.in_layer else 0.0)
            for at in own.moments
        )  # fmt: skip
        if memory <= problem.memory_bytes and (best is None or time_s < best.time_s):
            put_off = own.put_off_s + sum(problem.classes[c].put_off_s for c in layers)
            best = StagePrice(time_s, time_s - put_off, put_off + problem.tail_s(s, counts), memory, counts, ())
    return best


def test_optimal_on_random_instances() -> None:
    feasible = with_ilp = chunked = 0
    classes: dict[str, set[int]] = {"chunks": set(), "segments": set()}
    for seed in range(300):
        problem = random_problem(seed)
        expected, found = brute_force(problem), solved(problem)
        if expected is None:
            assert found is None
            needed, _ = StageTable(problem).memory_needed()
            assert needed > problem.memory_bytes
            continue
        assert found is not None
        assert found.step_s == pytest.approx(expected, rel=1e-9)
        assert isinstance(solve_pipeline(problem, cutoff_s=expected * 0.999), float)
        feasible += 1
        with_ilp += found.variables > 0
        chunked += problem.virtual_stages > 1
        kinds = len(set(problem.layers))
        classes["chunks"] |= {kinds} if problem.virtual_stages > 1 else set()
        full = [i for i, c in enumerate(problem.classes) for m in c.modes if m.name == "full" and problem.segment > 1
                and any(stage.modes[i][c.modes.index(m)] for stage in found.stages)]  # fmt: skip
        classes["segments"] |= {len(full)} if full and kinds > 1 else set()
    assert feasible >= 80
    assert with_ilp >= 20
    assert chunked >= 10
    assert classes == {"chunks": {1, 2, 3}, "segments": {1, 2, 3}}


def test_ranks_between_the_ends_hold_as_many_layers_or_the_earlier_ones_one_more() -> None:
    """Several chunks of several classes on four and five ranks, where not every cut is listed."""
    rng, uneven = random.Random(1), 0
    for _ in range(40):
        stages, layers = rng.choice([4, 5]), tuple(rng.randrange(2) for _ in range(rng.randint(10, 13)))
        classes = tuple(LayerClass((LayerMode("none", rng.uniform(0.5, 2), 1.0),), 0.0) for _ in range(2))
        costs = tuple(StageCost(time_s=rng.uniform(0, 1)) for _ in range(stages))
        problem = PipelineProblem(layers, classes, costs, 8, 1e9, virtual_stages=2)
        expected, found = brute_force(problem), solved(problem)
        assert expected is not None
        assert found is not None
        assert found.step_s == pytest.approx(expected, rel=1e-9)
        between = sizes(found)[1:-1]
        assert between == sorted(between, reverse=True)
        uneven += between[0] > between[-1]
    assert uneven > 5


def test_of_many_layers_the_mixes_that_fill_memory_are_enough() -> None:
    """A table lists these only, and moments on the hull only; `price_stage` lists all. In the last two seeds the
    fast mode alone fits, where the lean one's working set would not."""
    mixed = 0
    for seed in (*range(30), 53, 60):
        rng, drawn = random.Random(seed), random_problem(seed)
        layers = rng.randint(15, 20)
        fast = LayerMode("none", 1.0, rng.uniform(1, 2), rng.choice([0.5, 12.0]))
        some = [LayerMode(name, rng.uniform(1, 1.2), rng.uniform(0.2, 1), rng.uniform(0, 2))
                for name in rng.choice([("selective", "selective-ops"), ("selective-ops",), ()])]  # fmt: skip
        layer = LayerClass((fast, *some, LayerMode("full", 1.3, 0.05, rng.uniform(1, 20))), 0.5, 0.0, 1.5, 0.2)
        problem = replace(drawn, layers=(0,) * layers, classes=(layer,), memory_bytes=rng.uniform(20, 90),
                          tail_s=lambda stage, counts: 0.0)  # fmt: skip
        table = StageTable(problem)
        for stage in range(len(problem.stages)):
            for number, counts in enumerate(table.counts):
                here, there = table.price(stage, number), price_stage(problem, stage, counts)
                assert (here is None) == (there is None), seed
                if here is not None and there is not None:
                    assert here.time_s == pytest.approx(there.time_s, rel=1e-12), seed
                    assert here.memory_bytes == pytest.approx(there.memory_bytes, rel=1e-12), seed
                    mixed += sum(counts) >= 13 and sum(n > 0 for n in here.modes[0]) > 1
    assert mixed > 30


@pytest.mark.parametrize("count", [3, 14])
def test_a_segment_may_make_a_slower_mode_worth_it(count: int) -> None:
    """By its own figures "full" beats "selective-ops"; a segment of two, as one layer more would be, does not fit."""
    modes = (LayerMode("none", 1.0, 4.0), LayerMode("selective-ops", 1.2, 0.4, 1.0), LayerMode("full", 1.1, 0.3, 1.0))
    problem = PipelineProblem((0,) * count, (LayerClass(modes, 0.0, 0.0, 4.0),), (StageCost(),), 1, 0.0, segment=count)
    lean = LayerClass(modes[1:2], 0.0, 0.0, 4.0)
    needed, _ = StageTable(replace(problem, classes=(lean,))).memory_needed()
    found = solved(replace(problem, memory_bytes=needed - 0.05))
    assert found is not None
    assert found.stages[0].modes == ((0, count - 1, 1),)


def test_frugal_mixes_need_as_little_as_all() -> None:
    """Whatever a stage holds beside them: bytes kept weigh more or less than the working set."""
    rng = random.Random(0)
    for _ in range(300):
        names = rng.sample(["none", "selective", "selective-ops", "full"], rng.randint(1, 4))
        own = [(rng.uniform(1, 2), rng.uniform(0, 4), rng.choice([0.0, rng.uniform(0, 9)])) for _ in names]
        modes = tuple(LayerMode(name, *figures) for name, figures in zip(names, own, strict=True))
        layer = LayerClass(modes, 1.0, whole_bytes=rng.uniform(0, 4))
        sizes = rng.randint(1, 9), rng.choice([1, 2, 4]), rng.choice([1, 2])
        every, (kept, working) = class_mixes(layer, *sizes), frugal(layer, *sizes)
        for weight in (0.0, 0.3, 1.0, 4.0):
            least = (weight * every.kept_bytes + every.transient_bytes).min()
            assert (weight * kept + working).min() == pytest.approx(least, rel=1e-12)


def test_memory_needed_is_the_border_of_feasibility() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        needed, _ = StageTable(problem).memory_needed()
        for scale, fits in ((1 + 1e-9, True), (1 - 1e-6, False)):
            assert (solved(replace(problem, memory_bytes=needed * scale)) is not None) == fits


def test_a_cut_that_the_ilp_beats_is_an_error() -> None:
    problem = equal_layers(8, 2)
    best = solved(problem)
    assert best is not None
    table = StageTable(problem)
    worse = [table.price(0, table.number(0, 5)), table.price(1, table.number(0, 3))]
    stages = tuple(s for s in worse if s)
    slow = replace(best, runs=((0, 5), (5, 8)), stages=stages, step_s=step_time(stages, 8))
    with pytest.raises(AssertionError):
        prove(problem, slow)


@pytest.mark.parametrize("seed", range(12))
def test_checkpointing_alone_is_the_dynamic_programme_of_a_chain(seed: int) -> None:
    """One stage, integer bytes: least time over (layers done, bytes kept, largest working set), layer by layer."""
    rng = random.Random(seed)
    classes = tuple(
        LayerClass(tuple(LayerMode(name, rng.randint(4, 9) + extra, kept, working) for name, extra, kept, working in
                         (("none", 0, rng.randint(6, 9), 1), ("selective", 1, rng.randint(3, 6), 2),
                          ("full", 3, 1, rng.randint(5, 9)))), rng.randint(0, 2))
        for _ in range(2)
    )  # fmt: skip
    layers = tuple(rng.randrange(2) for _ in range(9))
    own = StageCost(0.0, 3, 1, (Moment(2, in_layer=False, beside={"logits": 2}), Moment(2)))
    problem = PipelineProblem(layers, classes, (own,), 4, rng.randint(60, 160))
    room = problem.memory_bytes - 3 - 2 * 1 - sum(classes[c].static_bytes for c in layers)
    states = {(0, 2.0): 0.0}
    for c in layers:
        following: dict[tuple[int, float], float] = {}
        for (kept, working), time_s in states.items():
            for mode in classes[c].modes:
                key = (int(kept + 2 * mode.saved_bytes), max(working, mode.transient_bytes))
                following[key] = min(following.get(key, 1e9), time_s + mode.time_s)
        states = following
    feasible = [t for (kept, working), t in states.items() if kept + working <= room]
    found = solved(problem)
    assert (found is None) == (not feasible)
    if found is not None:
        assert found.stages[0].time_s == pytest.approx(min(feasible))
