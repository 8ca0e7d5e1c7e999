"""Predictions for published runs, kept apart from the constants so that a fit can price them many times."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from published_rows import Row, Run, as_run
from row_work import run_work, work_key

from autopar.cost_model.constant_table import Constants, load_constants, with_constants
from autopar.cost_model.machine import Machine
from autopar.cost_model.run_memory import run_memory
from autopar.cost_model.run_price import RunWork, price_run
from autopar.errors import AutoparError
from autopar.hardware import generation_of

__all__ = ["Prepared", "memory", "prepare_rows", "price"]


@dataclass(frozen=True)
class Prepared:
    """A run with its work; `generation` is that of its device."""

    run: Run
    work: RunWork
    generation: str


def prepare_rows(rows: Iterable[Row], workers: int = 1) -> tuple[list[Prepared], dict[str, str]]:
    """Runs that can be priced, and id -> reason of those that cannot. Every distinct block is captured once, by one of
    `workers` processes."""
    runs: list[Run] = []
    refused: dict[str, str] = {}
    names: set[str] = set()
    for number, row in enumerate(rows, 1):
        name = str(row.get("id") or f"row {number}")
        if name in names:
            name = f"{name} (row {number})"
        names.add(name)
        try:
            runs.append(as_run({**row, "id": name}))
        except AutoparError as error:
            refused[name] = str(error)
    by_shape: dict[Any, dict[Any, Run]] = {}
    for run in runs:
        by_shape.setdefault(run.shape, {}).setdefault(work_key(run), run)
    works = _works([list(distinct.values()) for distinct in by_shape.values()], workers)
    prepared = []
    for run in runs:
        work = works[work_key(run)]
        if isinstance(work, str):
            refused[run.id] = work
            continue
        candidate = Prepared(run, work, generation_of(run.cluster.device))
        reason = _unpriced(candidate)
        if reason:
            refused[run.id] = reason
        else:
            prepared.append(candidate)
    return prepared, refused


def _unpriced(prepared: Prepared) -> str:
    """Why the run has no price: a device without the precision, a recipe without a constant."""
    try:
        price(prepared, load_constants())
    except AutoparError as error:
        return str(error)
    return ""


def _works(groups: Sequence[Sequence[Run]], workers: int) -> dict[Any, RunWork | str]:
    if workers <= 1 or len(groups) <= workers:
        found = map(_shape_works, groups)
        return {key: work for works in found for key, work in works.items()}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return {key: work for works in pool.map(_shape_works, groups) for key, work in works.items()}


def _shape_works(runs: Sequence[Run]) -> dict[Any, RunWork | str]:
    """Work of runs that share a block's shape by `work_key`, or why there is none."""
    found: dict[Any, RunWork | str] = {}
    for run in runs:
        try:
            found[work_key(run)] = _portable(run_work(run))
        except AutoparError as error:
            found[work_key(run)] = str(error)
    return found


def _portable(work: RunWork) -> RunWork:
    """Without the strategies, whose keys are nodes of this process."""
    parts = {name: replace(getattr(work, name), strategies={}) for name in ("layer", "prologue", "epilogue")}
    return replace(work, **parts)


def price(prepared: Prepared, constants: Constants) -> Mapping[str, float]:
    """Predicted seconds of one step by part, and "total"."""
    run = prepared.run
    cluster = with_constants(run.cluster, constants)
    dtype = "fp16" if prepared.generation == "volta" else "bf16"
    machine = Machine.of(cluster.device, cluster.stack, dtype, fp8=run.layout.fp8, constants=constants)
    return price_run(prepared.work, run.layout, cluster, run.traits, machine, constants.generation(prepared.generation))


def memory(prepared: Prepared, constants: Constants) -> Mapping[str, float]:
    """Predicted peak bytes of the fullest rank as each instrument shows it."""
    run = prepared.run
    peak = run_memory(prepared.work, run.layout, run.traits, constants.generation(prepared.generation))
    return {"allocated": peak.allocated, "reserved": peak.reserved, "device": peak.device}
