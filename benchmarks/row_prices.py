"""Predictions for published runs, kept apart from the constants so that a fit can price them many times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from published_rows import Row, Run, as_run
from row_work import run_work, work_key

from autopar.cost_model.constant_table import Constants, with_constants
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


def prepare_rows(rows: Iterable[Row]) -> tuple[list[Prepared], dict[str, str]]:
    """Runs that can be priced, and id -> reason of those that cannot."""
    works: dict[Any, RunWork] = {}
    prepared, refused = [], {}
    for row in rows:
        try:
            run = as_run(row)
            key = work_key(run)
            if key not in works:
                works[key] = run_work(run)
        except AutoparError as error:
            refused[str(row.get("id"))] = str(error)
            continue
        prepared.append(Prepared(run, works[key], generation_of(run.cluster.device)))
    return prepared, refused


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
