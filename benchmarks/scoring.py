"""Errors of predictions: by source, by pair of layouts, by kind of memory figure. Plain data in, plain data out."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from published_rows import Run

__all__ = ["Priced", "memory_scores", "ordering_scores", "time_scores"]

APART = 0.05
"""Pairs of layouts nearer than this are not asked to be ordered."""


@dataclass(frozen=True)
class Priced:
    """`parts` are predicted seconds; `memory_bytes` predicted peak of the fullest rank by mem_kind."""

    run: Run
    parts: Mapping[str, float]
    memory_bytes: Mapping[str, float]

    @property
    def error(self) -> float:
        """Relative error of the step time, positive when predicted too slow."""
        assert self.run.step_s is not None
        return self.parts["total"] / self.run.step_s - 1


def _summary(errors: Sequence[float]) -> dict[str, float]:
    sizes = sorted(abs(e) for e in errors)
    return {
        "n": len(sizes),
        "median_abs_error": statistics.median(sizes),
        "mean_abs_error": statistics.fmean(sizes),
        "p90_abs_error": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        "bias": statistics.fmean(errors),
    }


def _by(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def time_scores(priced: Sequence[Priced]) -> dict[str, Any]:
    timed = [p for p in priced if p.run.step_s is not None]
    by_source = {s: _summary([p.error for p in ps]) for s, ps in _by(timed, lambda p: p.run.source).items()}
    return {"overall": _summary([p.error for p in timed]) if timed else {}, "by_source": by_source}


def ordering_scores(priced: Sequence[Priced]) -> dict[str, Any]:
    """Per source and overall: share of pairs of layouts of one model and cluster that are ordered as measured, and the
    regret of the layout that looks fastest. Compared per sequence, since global batches differ."""
    groups = _by((p for p in priced if p.run.step_s is not None), _same_problem)
    pairs: dict[str, list[bool]] = defaultdict(list)
    regrets: dict[str, list[float]] = defaultdict(list)
    for group in groups.values():
        source = group[0].run.source
        times = [(p.run.step_s / p.run.row["gbs"], p.parts["total"] / p.run.row["gbs"], _layout_key(p)) for p in group]
        for (a, b, layout), (c, d, other) in itertools.combinations(times, 2):
            if layout != other and abs(a / c - 1) > APART and abs(c / a - 1) > APART:
                pairs[source].append((a < c) == (b < d))
        if len({layout for *_, layout in times}) > 2:
            regrets[source].append(min(times, key=lambda t: t[1])[0] / min(t[0] for t in times) - 1)
    every, all_regrets = list(itertools.chain(*pairs.values())), list(itertools.chain(*regrets.values()))
    scores = {s: _order(pairs[s], regrets[s]) for s in pairs}
    return {"overall": _order(every, all_regrets)} | scores if every else {}


def _order(pairs: Sequence[bool], regrets: Sequence[float]) -> dict[str, float]:
    found: dict[str, float] = {"pairs": len(pairs), "ordered": sum(pairs) / len(pairs)}
    if regrets:
        found |= {"groups": len(regrets), "median_regret": statistics.median(regrets)}
    return found


def _same_problem(priced: Priced) -> tuple[Any, ...]:
    row, run = priced.run.row, priced.run
    return (
        run.source,
        run.shape,
        row["layers"],
        row["seq"],
        row["gpu"],
        row["n_gpus"],
        row["precision"],
        row["framework"],
    )


def _layout_key(priced: Priced) -> tuple[Any, ...]:
    layout = priced.run.layout
    return (layout.degrees, layout.virtual_stages, layout.micro_batch, layout.zero, layout.zero_shard, layout.recompute,
            priced.run.traits.overlap)  # fmt: skip


def memory_scores(priced: Sequence[Priced]) -> dict[str, Any]:
    """Per mem_kind the error of the peak, and what was said of runs that did not fit."""
    scores: dict[str, Any] = {}
    measured = [p for p in priced if p.run.row.get("peak_mem_gib") and not p.run.row.get("oom")]
    for kind, group in _by(measured, lambda p: p.run.mem_kind).items():
        scores[kind] = _summary([p.memory_bytes[kind] / p.run.peak_bytes - 1 for p in group])
    scores["oom"] = [
        {"id": p.run.id, "predicted_gib": p.memory_bytes["device"] / 2**30, "device_gib": p.run.device_bytes / 2**30,
         "fits": p.memory_bytes["device"] <= p.run.device_bytes}
        for p in priced if p.run.row.get("oom")
    ]  # fmt: skip
    return scores
