"""Solvers that answer, lie, crash, hang, write half an answer, or are not there."""

from __future__ import annotations

import random
import stat
from dataclasses import replace
from pathlib import Path

import pulp
import pytest

from autopar.cost_model import block_ilp, pipeline_ilp, solver, solver_backends
from autopar.cost_model.block_beam import beam_search
from autopar.cost_model.block_ilp import layout_cost, solve_block
from autopar.cost_model.mip import Answer, simple_bound
from autopar.cost_model.pipeline_ilp import prove, solve_pipeline
from autopar.cost_model.solver import Model, SolverError, SolverPolicy, solve
from autopar.errors import SpecError
from autopar.search_spec import SearchSpec
from tests.cost_model import test_block_ilp, test_pipeline_ilp

CBC, HEURISTIC = SolverPolicy("cbc"), SolverPolicy("heuristic")


def knapsack(items: int = 12, seed: int = 0) -> Model:
    """Most value within a weight, with a penalty column, a constant and a column nobody asks about."""
    rng = random.Random(seed)
    model = Model("knapsack", constant=7.0)
    columns = [model.add_binary(-rng.uniform(1, 5)) for _ in range(items)]
    over = model.add_continuous(10.0)
    model.add_continuous(0.0, 2.0, 3.0)
    model.add_row([*((c, rng.uniform(1, 5)) for c in columns), (over, -1.0)], "<=", items)
    return model


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    if "highs" in names:
        monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    if "cbc" in names:
        monkeypatch.setattr(solver_backends, "cbc_path", lambda: None)


def script(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """CBC replaced by a shell script; `$solution` is the file it should write."""
    path = folder / "cbc"
    path.write_text(f"#!/bin/sh\nfor solution; do :; done\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(solver_backends, "cbc_path", lambda: str(path))
    without(monkeypatch, "highs")


@pytest.mark.parametrize("seed", range(6))
def test_both_solvers_agree(seed: int) -> None:
    model = knapsack(seed=seed)
    highs, cbc = (solve(model, policy=SolverPolicy(name)) for name in ("highs", "cbc"))
    assert (highs.solver, cbc.solver, highs.notes, cbc.notes) == ("highs", "cbc", (), ())
    assert highs.status == cbc.status == "optimal"
    assert highs.objective == pytest.approx(cbc.objective, rel=1e-6)
    assert simple_bound(model) <= highs.objective


@pytest.mark.parametrize("name", ["highs", "cbc"])
def test_infeasible_is_an_answer(name: str) -> None:
    model = Model("none")
    x = model.add_binary(1.0)
    model.add_row([(x, 2.0)], "==", 1.0)
    found = solve(model, policy=SolverPolicy(name))
    assert (found.status, found.values, found.solver) == ("infeasible", (), name)


def test_that_nothing_is_possible_is_asked_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """One solver alone is believed only where the other gives no answer."""
    monkeypatch.setitem(solver.BACKENDS, "highs", lambda *_: Answer("infeasible"))  # type: ignore[arg-type]
    with pytest.raises(SolverError, match="highs finds no answer possible, cbc has one"):
        solve(knapsack())
    without(monkeypatch, "cbc")
    assert solve(knapsack()).status == "infeasible"


@pytest.mark.parametrize("error", [RuntimeError("boom"), AttributeError("no passModel"), MemoryError()])
def test_a_highs_that_crashes_gives_way_to_cbc(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def crash(*_: object) -> None:
        raise error

    monkeypatch.setattr(pulp.HiGHS, "actualSolve", crash)
    found = solve(knapsack())
    assert (found.status, found.solver) == ("optimal", "cbc")
    assert found.notes[0].startswith(f"highs gave no answer: {type(error).__name__} {error}".strip())


def test_half_an_answer_of_highs_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pulp.LpProblem.solve

    def half(problem: pulp.LpProblem, *args: object) -> None:
        whole(problem, *args)
        problem.variables()[3].varValue = None

    monkeypatch.setattr(pulp.LpProblem, "solve", half)
    found = solve(knapsack())
    assert (found.status, found.solver) == ("optimal", "cbc")
    assert found.notes == ("highs gave no answer: its solution holds 13 of 14 columns",)


@pytest.mark.parametrize(
    ("values", "text"),
    [((1.0, 1.0), "breaks row 0 by 1"), ((0.5, 0.5), "answered 0.5 for column 0"), ((2.0, -1.0), "for column 0"),
     ((1.0,), "1 of 2 columns"), ((float("nan"), 1.0), "answered nan")],
)  # fmt: skip
def test_an_answer_that_breaks_a_constraint_raises(
    monkeypatch: pytest.MonkeyPatch, values: tuple[float, ...], text: str
) -> None:
    model = Model("one of two")
    columns = [model.add_binary(1.0), model.add_binary(2.0)]
    model.add_row([(c, 1.0) for c in columns], "==", 1.0)
    monkeypatch.setitem(solver.BACKENDS, "highs", lambda *_: Answer("optimal", values))  # type: ignore[arg-type]
    with pytest.raises(SolverError, match=text):
        solve(model)


def test_a_bound_above_the_answer_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("one")
    model.add_binary(1.0)
    monkeypatch.setitem(solver.BACKENDS, "highs", lambda *_: Answer("incumbent", (1.0,), 2.0))  # type: ignore[arg-type]
    with pytest.raises(SolverError, match="claims a bound of 2"):
        solve(model)


def test_an_absent_solver_gives_way_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case ps-04 (c)."""
    whole = solve(knapsack())
    without(monkeypatch, "highs")
    found = solve(knapsack())
    assert found.solver == "cbc"
    assert found.objective == pytest.approx(whole.objective)
    assert found.notes == ("highs gave no answer: it is not installed (pip install highspy)",)
    without(monkeypatch, "cbc")
    nothing = solve(knapsack())
    assert (nothing.status, nothing.values, len(nothing.notes)) == ("no answer", (), 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo cannot read licence; exit 1", "exit status 1: 'cannot read licence'"),
        ("exit 0", "no solution was written"),
        ("kill -9 $$", "exit status -9"),
        ('printf "Optimal - objective value 1.0\\n      0 X0000000 1 0\\n      1 X00000" > "$solution"',
         "holds 2 of 14 columns"),
        ('echo "Stopped on time (no integer solution - continuous used) - objective value 1" > "$solution"',
         "its status is 'Stopped on time"),
    ],
)  # fmt: skip
def test_a_broken_cbc_is_never_half_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, why: str) -> None:
    """Field case ps-04 (b): a crash, a kill, and an answer cut short in the middle of a line."""
    script(monkeypatch, tmp_path, text)
    found = solve(knapsack())
    assert (found.status, found.values) == ("no answer", ())
    assert why in found.notes[-1]


def test_a_cbc_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(monkeypatch, tmp_path, "exec sleep 60")
    monkeypatch.setattr(solver_backends, "_CBC_GRACE_S", 0.1)
    found = solve(knapsack(), policy=SolverPolicy("cbc", time_limit_s=0.2))
    assert found.status == "no answer"
    assert "killed after 0.3 s" in found.notes[0]


def test_an_incumbent_keeps_its_proven_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    best = solve(knapsack())
    lines = "\\n".join(f"{i} X{i:07d} {value} 0" for i, value in enumerate([0.0] * 12))
    answer = f'printf "Stopped on time - objective value 0\\n{lines}\\n12 X0000012 0 0\\n" > "$solution"'
    script(monkeypatch, tmp_path, f"{answer}\necho 'Lower bound:                -37.0'")
    found = solve(knapsack())
    assert (found.status, found.objective) == ("incumbent", 7.0)
    assert found.bound == pytest.approx(-30.0, abs=1e-3)
    assert found.bound <= -30.0 - 5e-4, "the log rounds"
    assert found.bound <= best.objective <= found.objective
    assert found.gap == pytest.approx(37 / 7, rel=1e-3)


def test_blocks_without_a_solver() -> None:
    """The beam finds what brute force finds where nothing is cut off, and its bound holds where something is."""
    cut_off = 0
    for seed in range(60):
        problem = test_block_ilp.random_problem(seed)
        expected = solve_block(problem)
        assert (solve_block(problem, policy=HEURISTIC) is None) == (expected is None)
        if expected is None:
            continue
        found = solve_block(problem, policy=HEURISTIC)
        assert found is not None
        assert found.cost_us == pytest.approx(found.bound_us) == pytest.approx(expected.cost_us)
        narrow = beam_search(problem, width=1)
        assert narrow is not None
        picks, bound_us = narrow
        cost_us = layout_cost(problem, picks)
        assert cost_us is not None
        assert bound_us <= expected.cost_us * (1 + 1e-9)
        assert cost_us >= expected.cost_us * (1 - 1e-9)
        cut_off += bound_us < cost_us
    assert cut_off > 10


def test_blocks_with_cbc() -> None:
    for seed in range(6):
        problem = test_block_ilp.random_problem(seed)
        highs, cbc = solve_block(problem), solve_block(problem, policy=CBC)
        assert (highs is None) == (cbc is None)
        assert highs is None or cbc is None or cbc.cost_us == pytest.approx(highs.cost_us, rel=1e-6)


def test_pipelines_without_a_solver() -> None:
    """The sweep's cut stands, unproven by an ILP; the solver's absence is no error."""
    for seed in range(40):
        problem = test_pipeline_ilp.random_problem(seed)
        found = solve_pipeline(problem)
        if isinstance(found, float):
            continue
        alone, proven = prove(problem, found, policy=HEURISTIC), prove(problem, found)
        assert alone.step_s == alone.bound_s == proven.step_s
        assert alone.solver == ("heuristic" if proven.variables else "")


def test_a_dearer_cut_called_optimal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep knows a better one."""
    real, told = solver.BACKENDS["highs"], list[str]()

    def dearer(model: Model, limit_s: float) -> Answer:
        best = answer = real(model, limit_s)
        model = replace(model, rows=list(model.rows))
        while answer.values and _cost(model, answer) <= _cost(model, best) * (1 + 1e-6):
            picked = [(i, 1.0) for i, value in enumerate(answer.values) if model.integer[i] and value > 0.5]
            model.add_row(picked, "<=", len(picked) - 1)
            answer = real(model, limit_s)
        told.append(model.name if answer.values else "")
        return answer if answer.values else best

    monkeypatch.setitem(solver.BACKENDS, "highs", dearer)  # type: ignore[arg-type]
    for seed in (43, 132, 163, 187):  # few problems leave columns of which a dearer cut can be made
        problem = test_pipeline_ilp.random_problem(seed)
        found = solve_pipeline(problem)
        assert not isinstance(found, float)
        with pytest.raises(AssertionError):
            prove(problem, found)
    assert told == ["pipeline"] * 4


def _cost(model: Model, answer: Answer) -> float:
    return sum(c * x for c, x in zip(model.costs, answer.values, strict=True))


PIPELINE = ("add_one_run_per_stage", "add_all_layers", "add_runs_join", "add_ladder")
BLOCK = ("add_edges_leave_producers", "add_edges_enter_consumers", "add_shared_conversions")


@pytest.mark.parametrize("name", [*PIPELINE, *BLOCK])
def test_no_constraint_can_be_lost_unseen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without it the answers break it, which raises, or are the same."""
    module = pipeline_ilp if name in PIPELINE else block_ilp
    whole, raised = getattr(module, name), 0
    for seed in range(16):
        problem, block = test_pipeline_ilp.random_problem(seed), test_block_ilp.random_problem(seed)
        cut, layout = solve_pipeline(problem), solve_block(block)
        again = layout
        monkeypatch.setattr(module, name, lambda *_: None)
        try:
            if name in BLOCK and layout is not None:
                again = solve_block(block)
            elif name in PIPELINE and not isinstance(cut, float):
                prove(problem, cut)
        except AssertionError:
            raised += 1
        monkeypatch.setattr(module, name, whole)
        assert layout is None or (again is not None and again.cost_us == pytest.approx(layout.cost_us)), f"seed {seed}"
    assert raised >= 3


def test_the_policy_takes_what_is_left_of_the_time() -> None:
    assert SolverPolicy("cbc").order == ("cbc", "highs")
    assert HEURISTIC.order == ()
    assert SolverPolicy().left_s() == 30.0
    assert replace(SolverPolicy(), deadline_s=0.0).left_s() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("values", "text"),
    [({"solver": "cplex"}, "search.solver: 'cplex' is not one of highs, cbc, heuristic"),
     ({"time_limit_s": 0}, "search.time_limit_s"), ({"time_limit_s": float("inf")}, "search.time_limit_s")],
)  # fmt: skip
def test_a_search_spec_is_checked(values: dict[str, object], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        SearchSpec(**values)  # type: ignore[arg-type]
