"""HiGHS in process and CBC as a process of its own, both fed by PuLP: the one module that imports it.

Traps avoided here: PuLP's `LpStatus` reads "Optimal" after a time-out, so `sol_status` is what counts; without an
incumbent PuLP still fills variable values, so they are not read; `LpAffineExpression(list)` overwrites a repeated
variable, so `Model.add_row` adds coefficients up first; HiGHS must always run with one thread (changing the number
within a process returns garbage). PuLP waits for CBC for ever and takes a column missing in its solution file for zero,
so CBC is started, timed and read here.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pulp

from autopar.cost_model.mip import Answer, Model, NoAnswer

__all__ = ["BACKENDS", "cbc_path"]

_CBC_GRACE_S = 5.0
"""What CBC may take to start, read and write beside its own time limit."""

_CBC_ROUNDING = 5e-4

_SENSE = {"==": pulp.LpConstraintEQ, "<=": pulp.LpConstraintLE, ">=": pulp.LpConstraintGE}


def run_highs(model: Model, time_limit_s: float) -> Answer:
    """Raises NoAnswer: not installed, failed, or out of time with nothing found."""
    # our models are tight and small: presolve takes longer than it saves (0.9 against 0.5 s for ten block ILPs)
    solver = pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit_s, gapRel=0.0, presolve="off")
    if not solver.available():
        raise NoAnswer("it is not installed (pip install highspy)")
    problem, variables = _build(model)
    try:
        with _silent_stdout():
            problem.solve(solver)
    except Exception as error:  # a library of another make: whatever it raises is its crash
        raise NoAnswer(" ".join([type(error).__name__, *str(error).split()])[:200]) from error
    status = problem.sol_status
    if status == pulp.LpSolutionInfeasible:
        return Answer("infeasible")
    if status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise NoAnswer(f"nothing found within {time_limit_s:.3g} s")
    idle = model.idle_columns()
    found = [model.lows[i] if i in idle else v.varValue for i, v in enumerate(variables)]
    values = tuple(float(value) for value in found if value is not None)
    if len(values) != len(found):
        raise NoAnswer(f"its solution holds {len(values)} of {len(found)} columns")
    if status == pulp.LpSolutionOptimal:
        return Answer("optimal", values)
    # PuLP's HiGHS leaves the constant of the objective out
    return Answer("incumbent", values, float(problem.solverModel.getInfo().mip_dual_bound) + model.constant)


def run_cbc(model: Model, time_limit_s: float) -> Answer:
    """Raises NoAnswer: no executable, a crash, a hang, a solution file that is not whole, or nothing found in time."""
    path = cbc_path()
    if path is None:
        raise NoAnswer("there is no executable (pip install 'pulp[cbc]')")
    problem, _ = _build(model)
    with tempfile.TemporaryDirectory(prefix="autopar-cbc-") as folder:
        given, found = Path(folder, "model.mps"), Path(folder, "solution.txt")
        written, names, *_ = problem.writeMPS(str(given), rename=1)
        columns = {names[variable.name]: int(variable.name[1:]) for variable in written}
        log = _run_cbc(path, given, found, time_limit_s)
        try:
            text = found.read_text()
        except (OSError, ValueError) as error:
            raise NoAnswer(f"no solution was written; its last words: {log[-200:].strip()!r}") from error
    return _read_cbc(text, columns, log, model)


def cbc_path() -> str | None:
    """PuLP's own CBC, else the one on the PATH."""
    bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    if isinstance(bundled, str) and os.access(bundled, os.X_OK):
        return bundled
    return shutil.which("cbc")


def _run_cbc(path: str, given: Path, found: Path, time_limit_s: float) -> str:
    """What CBC prints. Its own limit is in wall-clock seconds; one that hangs is killed."""
    command = [path, str(given), "-sec", f"{time_limit_s:.3f}", "-ratio", "0", "-timeMode", "elapsed", "-solve",
               "-printingOptions", "all", "-solution", str(found)]  # fmt: skip
    limit_s = time_limit_s + _CBC_GRACE_S
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"killed after {limit_s:.3g} s") from error
    except OSError as error:
        raise NoAnswer(f"{path} does not start: {error.strerror}") from error
    log = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode != 0:
        raise NoAnswer(f"{path} ended with exit status {done.returncode}: {log[-200:].strip()!r}")
    return log


def _read_cbc(text: str, columns: Mapping[str, int], log: str, model: Model) -> Answer:
    """CBC's solution file: a status line, then "[**] index name value reduced-cost" for every row and column."""
    lines = text.splitlines()
    status = lines[0] if lines else ""
    if re.match(r"(Integer infeasible|Infeasible)", status):
        return Answer("infeasible")
    proven = status.startswith("Optimal")
    if not proven and not re.match(r"Stopped on [\w ]+ - objective", status):
        raise NoAnswer(f"its status is {status!r}")
    values = {i: model.lows[i] for i in model.idle_columns()}
    for line in lines[1:]:
        words = line.removeprefix("**").split()
        if len(words) == 4 and words[1] in columns:
            with contextlib.suppress(ValueError):  # a number cut short; the column then counts as missing
                values[columns[words[1]]] = float(words[2])
    if len(values) != len(model.costs):
        raise NoAnswer(f"its solution file holds {len(values)} of {len(model.costs)} columns")
    ordered = tuple(values[i] for i in range(len(model.costs)))
    if proven:
        return Answer("optimal", ordered)
    bound = re.search(r"^Lower bound:\s+(\S+)", log, re.MULTILINE)
    # the log leaves the constant of the objective out, as the MPS file does, and rounds to three places
    return Answer("incumbent", ordered, float(bound[1]) - _CBC_ROUNDING + model.constant if bound else -math.inf)


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS prints its banner when first loaded, before any option can turn it off, and would spoil `--json`."""
    saved, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(sink)


def _build(model: Model) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    problem = pulp.LpProblem("autopar", pulp.LpMinimize)
    kinds = ("Continuous", "Integer")
    variables = [
        problem.add_variable(f"c{i}", low, high, kinds[integer])
        for i, (low, high, integer) in enumerate(zip(model.lows, model.highs, model.integer, strict=True))
    ]
    problem.setObjective(pulp.LpAffineExpression([(v, c) for v, c in zip(variables, model.costs, strict=True) if c]))
    for index, (sense, terms, right) in enumerate(model.rows):
        expression = pulp.LpAffineExpression([(variables[i], c) for i, c in terms.items()])
        problem.addConstraint(pulp.LpConstraint(expression, _SENSE[sense], f"r{index}", right))
    return problem, variables


BACKENDS: Mapping[str, Callable[[Model, float], Answer]] = {"highs": run_highs, "cbc": run_cbc}
