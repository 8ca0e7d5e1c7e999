"""From measurements of this machine to a cluster file: `autopar calibrate`.

Device rates are the best seen, efficiencies what the other sizes reach of them. Each collective of each level of the
network gets the latency and bandwidth of one device that fit it best, by the logarithm of the error, under the formulas
the search prices with, and so does the level as a whole: what a backend does not emulate alike differs several times.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from autopar.cost_model.comm_cost import GroupCost, cards_used
from autopar.errors import SpecError
from autopar.hardware import DEVICES
from autopar.links import COLLECTIVES
from autopar.runtime.launch import join_torchrun, run_ranks
from autopar.runtime.measure import Sample, measure, measurement_count

__all__ = ["Calibration", "Level", "Rate", "calibrate", "calibrate_locally", "fit", "group_sizes", "show_progress"]

_LEAST_LATENCY_S = 1e-7
_FIT_ROUNDS, _MOST_STEP = 20, 0.9
_FIRST_GUESS = (1e-5, 1e-9)
"""Seconds a message and a byte."""
_NUDGE = 1e-6

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rate:
    """bytes/s and seconds a message as fitted; `error` is the median relative error of the fit over its samples."""

    bandwidth: float
    latency_s: float
    error: float

    def toml(self) -> list[str]:
        return [
            f"bandwidth = {self.bandwidth:.4g}  # bytes/s; the fit is {100 * self.error:.0f} % off in the median",
            f"latency = {self.latency_s:.3g}  # seconds",
        ]


@dataclass(frozen=True)
class Level:
    """A level of the network: `span` ranks; the rate of all collectives together, and of each kind."""

    name: str
    span: int
    rate: Rate
    kinds: tuple[tuple[str, Rate], ...]

    def toml(self) -> list[str]:
        lines = ["[[link]]", f'name = "{self.name}"', f"span = {self.span}", *self.rate.toml()]
        lines += ["efficiency = 1.0  # bandwidth is what was reached"]
        for kind, rate in self.kinds:
            lines += ["", f"[link.{kind}]", *rate.toml()]
        return lines


@dataclass(frozen=True)
class Calibration:
    """The figures of a cluster file. Rates in flop/s by dtype name, bandwidths in bytes/s; `samples` they come from."""

    kind: str
    device: str
    ranks: int
    memory_bytes: int
    flops: dict[str, float]
    matmul_efficiency: float
    attention_efficiency: float
    memory_bandwidth: float
    launch_s: float
    reserved_bytes: int
    levels: tuple[Level, ...]
    samples: tuple[Sample, ...]

    def toml(self, today: date | None = None) -> str:
        """A cluster file, each figure with what it was measured on; the samples follow as comments."""
        stamp = f"measured {(today or date.today()).isoformat()}, torch {torch.__version__}, {self.ranks} ranks at once"
        lines = [f"# {stamp}", f'name = "{self.device}"', f"num_devices = {self.ranks}", "", "[device]"]
        lines += [f'name = "{self.device}"']
        if self.kind == "cpu":
            lines.append('kind = "cpu"')
        lines.append(f"memory = {self.memory_bytes}  # bytes a rank, of the system")
        lines += [f"{dtype}_flops = {rate:.4g}  # best product" for dtype, rate in self.flops.items()]
        lines += [
            f"matmul_efficiency = {self.matmul_efficiency:.3f}  # median product over the best",
            f"attention_efficiency = {self.attention_efficiency:.3f}  # causal attention over the best product",
            f"memory_bandwidth = {self.memory_bandwidth:.4g}  # bytes/s that elementwise ops reach",
            "memory_efficiency = 1.0  # memory_bandwidth is what was reached",
            f"launch = {self.launch_s:.3g}  # seconds a small op with its views",
            f"reserved = {self.reserved_bytes}  # bytes; not measured",
        ]
        for level in self.levels:
            lines += ["", *level.toml()]
        lines += ["", "# samples: kind, dtype, ranks, shape, seconds"]
        lines += [f"# {s.kind}, {s.dtype}, {s.ranks}, {s.shape}, {s.seconds:.4g}" for s in self.samples]
        return "\n".join(lines) + "\n"


Progress = Callable[[int, int, Sample], None]
"""Called on rank 0 after each figure of each round: how many are taken, how many in all, the last one."""


def calibrate(progress: Progress | None = None) -> Calibration:
    """Measure the processes of this torchrun job, or this process alone. Collective; every rank gets the same."""
    device = join_torchrun()
    world = dist.get_world_size() if dist.is_initialized() else 1
    levels = _level_sizes(world)
    sizes, report = group_sizes(levels), None
    if progress is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        count = measurement_count(device, sizes)
        taken = itertools.count(1)
        report = lambda sample: progress(next(taken), count, sample)  # noqa: E731
    return fit(measure(device, sizes, report), device, world, levels)


def calibrate_locally(ranks: int, progress: Progress | None = None, timeout_s: float = 600.0) -> Calibration:
    """Measure `ranks` new gloo processes on this machine. `progress` has to be a module-level function: it is pickled.

    Raises SpecError for less than one rank.
    """
    if ranks < 1:
        raise SpecError(f"must be a positive integer, not {ranks}", where="--ranks")
    results: list[Calibration] = run_ranks(ranks, calibrate, progress, timeout_s=timeout_s)
    return results[0]


def show_progress(taken: int, count: int, sample: Sample) -> None:
    """A progress bar on stderr, drawn anew after each sample."""
    filled = 30 * taken // count
    text = f"{sample.kind} {sample.dtype} {sample.shape}"[:44]
    end = "\n" if taken == count else ""
    print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {taken}/{count} {text:44}", end=end, file=sys.stderr, flush=True)


def fit(samples: Sequence[Sample], device: torch.device, ranks: int, sizes: Sequence[int]) -> Calibration:
    """The figures that describe the samples; `sizes` are the spans of the network's levels, innermost first."""
    products = [s for s in samples if s.kind == "matmul"]
    flops = {
        dtype: max(s.amount / s.seconds for s in products if s.dtype == dtype)
        for dtype in dict.fromkeys(s.dtype for s in products)
    }
    reached = [s.amount / s.seconds / flops[s.dtype] for s in products]
    attention, memory, launch = (
        next(s for s in samples if s.kind == kind) for kind in ("attention", "memory", "launch")
    )
    names = ("node", "network") if len(sizes) > 1 else ("loopback" if device.type == "cpu" else "node",)
    return Calibration(
        kind=device.type,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "local process",
        ranks=ranks,
        memory_bytes=_memory_bytes(device, ranks),
        flops=flops,
        matmul_efficiency=min(1.0, statistics.median(reached)),
        attention_efficiency=min(1.0, attention.amount / attention.seconds / flops[attention.dtype]),
        memory_bandwidth=memory.amount / memory.seconds,
        launch_s=launch.seconds / launch.amount,
        reserved_bytes=DEVICES["cpu" if device.type == "cpu" else "a100-80g"].reserved_bytes,
        levels=tuple(
            _fit_level(name, inside, span, samples)
            for name, inside, span in zip(names, (1, *sizes), sizes, strict=False)
        ),
        samples=tuple(samples),
    )


def _level_sizes(world: int) -> tuple[int, ...]:
    """The ranks of a node, if torchrun says there are several nodes, then all ranks."""
    node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world == 1:
        return ()
    return (node, world) if 1 < node < world and world % node == 0 else (world,)


def group_sizes(levels: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the groups to measure: whole levels, and pairs inside the first, which share its links."""
    return tuple(sorted({2, *levels})) if levels and levels[0] % 2 == 0 else tuple(levels)


def _fit_level(name: str, inside: int, span: int, samples: Sequence[Sample]) -> Level:
    """From the groups that cross the level and no further one; they have `inside` members in each unit below it."""
    crossing = [s for s in samples if inside < s.ranks <= span and s.kind in COLLECTIVES]
    kinds = ((kind, [s for s in crossing if s.kind == kind]) for kind in COLLECTIVES)
    rates = tuple((kind, _fit_rate(own, inside)) for kind, own in kinds if own)
    return Level(name, span, _fit_rate(crossing, inside), rates)


def _fit_rate(samples: Sequence[Sample], inside: int) -> Rate:
    """Least squares of the errors' logarithms in latency and seconds per byte, neither below zero: half as long is as
    wrong as twice as long. Each round is linear around the fit of the last one. `inside`: see `_fit_level`."""
    latency, per_byte = _FIRST_GUESS
    seconds = np.array([s.seconds for s in samples])
    fitted = seconds
    for _ in range(_FIT_ROUNDS):
        rows = np.array([_terms(s, inside, latency, per_byte) for s in samples])
        aim = fitted * (1 + np.clip(np.log(seconds / fitted), -_MOST_STEP, _MOST_STEP))
        latency, per_byte = _non_negative_fit(rows, aim, fitted)
        fitted = np.array([_seconds(s, inside, latency, per_byte) for s in samples])
    return Rate(1.0 / per_byte, latency, float(np.median(np.abs(fitted / seconds - 1))))


def _non_negative_fit(rows: Array, seconds: Array, scale: Array) -> tuple[float, float]:
    scaled, wanted = rows / scale[:, None], seconds / scale
    (latency, per_byte), *_ = np.linalg.lstsq(scaled, wanted, rcond=None)
    if latency < _LEAST_LATENCY_S:
        latency = _LEAST_LATENCY_S
        per_byte = float(scaled[:, 1] @ (wanted - latency * scaled[:, 0]) / (scaled[:, 1] ** 2).sum())
    if per_byte <= 0:  # latency alone explains them: a bandwidth no sample contradicts
        latency = float(scaled[:, 0] @ wanted / (scaled[:, 0] ** 2).sum())
        per_byte = float((seconds / np.maximum(rows[:, 1], 1.0)).min())
    return float(latency), float(per_byte)


def _seconds(sample: Sample, inside: int, latency: float, per_byte: float) -> float:
    cards = cards_used(sample.kind, sample.ranks, inside)
    return GroupCost(sample.ranks, cards / per_byte, latency).seconds(sample.kind, sample.amount)


def _terms(sample: Sample, inside: int, latency: float, per_byte: float) -> tuple[float, float]:
    """(messages, bytes through one card) that a rank waits for at such a rate, by which an all-reduce is a ring or a
    tree: the derivatives of its time."""
    here = _seconds(sample, inside, latency, per_byte)
    nbytes = (_seconds(sample, inside, latency, per_byte * (1 + _NUDGE)) - here) / (per_byte * _NUDGE)
    return (here - per_byte * nbytes) / latency, nbytes


def _memory_bytes(device: torch.device, ranks: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
