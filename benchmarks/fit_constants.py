"""Fit the constants marked `fitted` in cost_model/constants/fitted.toml to published step times.

    python benchmarks/fit_constants.py --data FILE            # fit all, print, --write to change the file
    python benchmarks/fit_constants.py --data FILE --cross    # leave one source out, each refitted

Least squares of log(predicted / measured), reweighted towards absolute errors, each constant within its physical
bounds, from its prior and with a weak pull towards it: what the data does not say stays where physics put it. Sources
weigh by the root of their rows, so that a large one does not decide alone. Cross-validation is by source, never by row:
rows of one source share its software, its cluster and its author's way of measuring.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from published_rows import read_rows
from row_prices import Prepared, prepare_rows, price

from autopar.cost_model.constant_table import FOLDER, Constant, Constants, load_constants
from autopar.errors import AutoparError

__all__ = ["cross_validate", "fit"]

Array = npt.NDArray[np.float64]

ROUNDS = 10
SOFT_ERROR = 0.05
"""Below this a row's error counts quadratically, above it linearly: releases of one stack differ by so much on the same
layout, which no constant can follow."""
PULL = 0.15
"""Weight of a constant's move over its whole range, in units of one row's 10 % error."""


class _Fit:
    def __init__(self, prepared: Sequence[Prepared], start: Constants) -> None:
        self.prepared = [p for p in prepared if p.run.step_s]
        self.start = start.priors()  # what these rows do not say keeps its prior
        kinds = {p.run.device_kind for p in self.prepared}
        generations = {p.generation for p in self.prepared}
        self.free: list[Constant] = [
            c for c in start if c.fitted and (not c.generation or c.generation in generations or c.generation in kinds)
        ]
        self.low = np.array([c.low for c in self.free])
        self.span = np.array([c.high - c.low for c in self.free])
        self.measured = np.log([p.run.step_s for p in self.prepared])
        rows = Counter(p.run.source for p in self.prepared)
        self.weight = np.array([_trust(p) / math.sqrt(rows[p.run.source]) for p in self.prepared])
        self.weight *= len(self.weight) / self.weight.sum()
        self.home = self._positions(self.start)

    def _positions(self, constants: Constants) -> Array:
        values = np.array([constants.table[c.key].value for c in self.free])
        return (values - self.low) / self.span

    def constants(self, x: Array) -> Constants:
        values = self.low + np.clip(x, 0, 1) * self.span
        return self.start.with_values({c.key: float(v) for c, v in zip(self.free, values, strict=True)})

    def residuals(self, x: Array, rows: Sequence[int] | None = None) -> Array:
        constants = self.constants(x)
        chosen = range(len(self.prepared)) if rows is None else rows
        return np.array([math.log(price(self.prepared[i], constants)["total"]) - self.measured[i] for i in chosen])

    def run(self, rounds: int) -> Constants:
        x, damping = self.home.copy(), 1e-2
        errors = self.residuals(x)
        best = self._loss(errors, x)
        for _ in range(rounds):
            jacobian = self._jacobian(x, errors)
            while damping < 1e4:
                trial = self._step(x, errors, jacobian, damping)
                trial_errors = self.residuals(trial)
                loss = self._loss(trial_errors, trial)
                if loss < best:
                    break
                damping *= 6
            else:
                break
            gain, best = best - loss, loss
            x, errors, damping = trial, trial_errors, damping / 4
            print(f"  loss {best:.4f}  mean {np.abs(np.expm1(errors)).mean():.4f}", file=sys.stderr, flush=True)
            if gain < 2e-3 * best:
                break
        return self.constants(x)

    def _loss(self, errors: Array, x: Array) -> float:
        rows = np.where(np.abs(errors) < SOFT_ERROR, errors**2 / (2 * SOFT_ERROR), np.abs(errors) - SOFT_ERROR / 2)
        return float((self.weight * rows).sum() + PULL * ((x - self.home) ** 2).sum())

    def _jacobian(self, x: Array, errors: Array) -> Array:
        columns = np.zeros((len(errors), len(x)))
        for j, constant in enumerate(self.free):
            rows = [i for i, p in enumerate(self.prepared)
                    if not constant.generation or constant.generation in (p.generation, p.run.device_kind)]  # fmt: skip
            moved = x.copy()
            step = 0.01 if x[j] < 0.5 else -0.01
            moved[j] += step
            columns[rows, j] = (self.residuals(moved, rows) - errors[rows]) / step
        return columns

    def _step(self, x: Array, errors: Array, jacobian: Array, damping: float) -> Array:
        """One damped Gauss-Newton step; constants that press against a bound are held there."""
        weight = self.weight / np.maximum(np.abs(errors), SOFT_ERROR)
        gradient = jacobian.T @ (weight * errors) + 2 * PULL * (x - self.home)
        held = ((x <= 0) & (gradient > 0)) | ((x >= 1) & (gradient < 0))
        free = np.flatnonzero(~held)
        hessian = (jacobian[:, free].T * weight) @ jacobian[:, free] + 2 * PULL * np.eye(len(free))
        hessian += damping * np.diag(np.diag(hessian))
        trial = x.copy()
        trial[free] -= np.linalg.solve(hessian, gradient[free])
        return np.clip(trial, 0, 1)


def _trust(prepared: Prepared) -> float:
    """Rows whose layout is partly inferred count half."""
    return 1.0 if prepared.run.row.get("tier") == "A" else 0.5


def fit(prepared: Sequence[Prepared], start: Constants | None = None, rounds: int = ROUNDS) -> Constants:
    """Constants fitted to the step times of `prepared`, from the priors of `start` (the shipped table if None)."""
    return _Fit(prepared, start or load_constants()).run(rounds)


def cross_validate(
    prepared: Sequence[Prepared], start: Constants | None = None, rounds: int = ROUNDS
) -> dict[str, Constants]:
    """For each source the constants fitted on all others."""
    found = {}
    for source in sorted({p.run.source for p in prepared}):
        print(f"without {source}", file=sys.stderr)
        found[source] = fit([p for p in prepared if p.run.source != source], start, rounds)
    return found


def write(constants: Mapping[str, float], path: Path) -> None:
    """Put fitted values into the TOML file, leaving everything else as it stands."""
    text = path.read_text(encoding="utf-8")
    for key, value in constants.items():
        generation, _, name = key.rpartition(".")
        start = text.index(f"[{name}]")
        end = text.find("\n[", start)
        section = text[start : end if end > 0 else len(text)]
        label = generation or "value"
        line = re.search(r"^values? = .*$", section, re.MULTILINE)
        assert line is not None
        new = re.sub(rf"(?<![\w-]){re.escape(label)} = [0-9.eE+-]+", f"{label} = {value:.4g}", line[0], count=1)
        changed = section.replace(line[0], new)
        text = text.replace(section, changed)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="published runs, JSON lines")
    parser.add_argument("--cross", action="store_true", help="leave one source out")
    parser.add_argument("--write", action="store_true", help="change the values in fitted.toml")
    arguments = parser.parse_args()
    try:
        rows = read_rows(arguments.data)
    except (OSError, AutoparError) as error:
        parser.error(str(error))
    prepared, refused = prepare_rows(rows)
    for row, reason in refused.items():
        print(f"not priced: {row}: {reason}", file=sys.stderr)
    if arguments.cross:
        for source, constants in cross_validate(prepared).items():
            errors = [abs(price(p, constants)["total"] / p.run.step_s - 1)
                      for p in prepared if p.run.source == source and p.run.step_s]  # fmt: skip
            print(f"{source:28} n {len(errors):4}  mean {np.mean(errors):.3f}  median {np.median(errors):.3f}")
        return
    found = fit(prepared)
    values = {c.key: c.value for c in found if c.fitted}
    for key, value in values.items():
        bound = found.table[key]
        note = "  at its bound" if value in (bound.low, bound.high) else ""
        print(f"{key:36} {value:10.4g} {bound.unit}{note}")
    if arguments.write:
        write(values, FOLDER / "fitted.toml")


if __name__ == "__main__":
    main()
