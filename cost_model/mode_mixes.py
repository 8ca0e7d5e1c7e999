"""How the layers of a stage are recomputed: mixes of modes.

A mix says how many layers of each class run in each mode. Of a stage it needs three sums: time, bytes kept per
micro-batch, and the largest working set of any mode used; they serve all stages. Before the mixes of two classes are
combined, those that another beats in all three sums are dropped, which is exact. Segments of several layers run over
classes: then the layers recomputed whole are the first ones of a stage, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = [
    "SAME",
    "LayerClass",
    "LayerMode",
    "Mixes",
    "class_mixes",
    "compositions",
    "frugal",
    "leanest",
    "merged",
    "mixes_of",
    "prefix_mixes",
    "useful_modes",
]

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

MOST_ROWS = 400_000
"""A stage with more mixes than this (132 layers, four modes) mixes three modes on the hull of time and bytes only."""


SAME = 1 + 1e-12
"""Sums that differ by less are equal but for the order they were added up in."""


@dataclass(frozen=True)
class LayerMode:
    """One way to run a layer: seconds per micro-batch (forward, backward, recompute, communication), bytes kept per
    micro-batch in flight, and the working bytes its backward needs once per stage on top."""

    name: str
    time_s: float
    saved_bytes: float
    transient_bytes: float = 0.0


@dataclass(frozen=True)
class LayerClass:
    """Layers of equal structure. `static_bytes` is what one layer takes from the start (parameters, optimizer) and
    `gradient_bytes` what comes with its gradients, `put_off_s` the part of a backward that zero-bubble moves to the
    end, `whole_bytes` what a layer keeps when nothing is recomputed, which a recomputed segment holds for each of its
    layers at once."""

    modes: tuple[LayerMode, ...]
    static_bytes: float
    put_off_s: float = 0.0
    whole_bytes: float = 0.0
    gradient_bytes: float = 0.0


@dataclass(frozen=True)
class Mixes:
    """A row a mix: seconds, bytes kept per micro-batch, working bytes, layers in each mode of each class."""

    time_s: Floats
    kept_bytes: Floats
    transient_bytes: Floats
    choice: Counts

    def __len__(self) -> int:
        return len(self.time_s)


def class_mixes(layer: LayerClass, count: int, segment: int = 1, chunks: int = 1) -> Mixes:
    """Useful mixes of `count` layers of one class. Consecutive layers in mode "full" are recomputed in segments of
    `segment` layers (within each of `chunks` equal parts of the stage); only a segment's input is kept."""
    modes = _mixed_modes(layer, count)
    choice = compositions(count, len(modes))
    wide = np.zeros((len(choice), len(layer.modes)), dtype=np.int64)
    wide[:, [layer.modes.index(mode) for mode in modes]] = choice
    return mixes_of(layer, wide, segment, chunks)


@lru_cache(maxsize=4096)
def _mixed_modes(layer: LayerClass, count: int) -> tuple[LayerMode, ...]:
    modes = useful_modes(layer.modes)
    return tuple(modes if _number_of_compositions(count, len(modes)) else _hull(modes))


def frugal(layer: LayerClass, count: int, segment: int = 1, chunks: int = 1) -> tuple[Floats, Floats]:
    """(kept bytes, working bytes) of mixes of which one needs least memory, whatever a stage holds: beside layers in
    mode "full" all others in one mode, for two modes work in the larger set and keep no less than the leaner."""
    modes = _mixed_modes(layer, count)
    full = next((mode for mode in modes if mode.name == "full"), None)
    others = [mode for mode in modes if mode is not full]
    layers = np.arange(count + 1) if full and others else np.array([count if full else 0])
    kept, working = np.zeros(len(layers)), np.zeros(len(layers))
    if full:
        kept, working = _recomputed_whole(full, layers, layer.whole_bytes, segment, chunks)
    if not others:
        return kept, working
    left = count - layers
    return np.concatenate([kept + left * mode.saved_bytes for mode in others]), np.concatenate(
        [np.maximum(working, np.where(left > 0, mode.transient_bytes, 0.0)) for mode in others]
    )


def mixes_of(layer: LayerClass, choice: Counts, segment: int = 1, chunks: int = 1) -> Mixes:
    """Mixes of the given numbers of layers in each mode, a row each; see `class_mixes`."""
    kept, transient, time_s = (np.zeros(len(choice)) for _ in range(3))
    for k, mode in enumerate(layer.modes):
        layers = choice[:, k]
        if not layers.any():
            continue
        own, working = layers * mode.saved_bytes, np.where(layers > 0, mode.transient_bytes, 0.0)
        if mode.name == "full" and segment > 1:
            own, working = _recomputed_whole(mode, layers, layer.whole_bytes, segment, chunks)
        kept += own
        transient = np.maximum(transient, working)
        time_s += layers * mode.time_s
    return Mixes(time_s, kept, transient, choice)


def leanest(layer: LayerClass, count: int, segment: int = 1, chunks: int = 1) -> tuple[Floats, Floats]:
    """(kept bytes, working bytes) that no mix of `count` layers goes below, by the number of layers in mode "full": the
    bytes of the leanest of the other modes, the working set of the smallest."""
    full = [mode for mode in layer.modes if mode.name == "full"]
    others = [mode for mode in layer.modes if mode.name != "full"]
    layers = np.arange(count + 1) if full and others else np.array([count if full else 0])
    kept, working = np.zeros(len(layers)), np.zeros(len(layers))
    if full:
        kept, working = _recomputed_whole(full[0], layers, layer.whole_bytes, segment, chunks)
    if others:
        kept = kept + (count - layers) * min(mode.saved_bytes for mode in others)
        least = min(mode.transient_bytes for mode in others)
        working = np.where(layers < count, np.maximum(working, least), working)
    return kept, working


def merged(first: Mixes, second: Mixes) -> Mixes:
    """Mixes of the layers of two classes on one stage, those that can be optimal."""
    first, second = _pareto(first), _pareto(second)
    a, b = len(first), len(second)
    left, right = np.repeat(np.arange(a), b), np.tile(np.arange(b), a)
    choice = np.concatenate([first.choice[left], second.choice[right]], axis=1)
    return Mixes(first.time_s[left] + second.time_s[right], first.kept_bytes[left] + second.kept_bytes[right],
                 np.maximum(first.transient_bytes[left], second.transient_bytes[right]), choice)  # fmt: skip


def prefix_mixes(classes: Sequence[LayerClass], held: Sequence[int], segment: int) -> Mixes:
    """Useful mixes of a stage that holds layers of the classes `held`, in order: the first ones in mode "full",
    recomputed in segments of `segment`, the others in any other modes."""
    places, others = zip(*(_apart(layer) for layer in classes), strict=True)
    left = [list(held).count(c) for c in range(len(classes))]
    time_s = kept = working = whole = most = 0.0
    found = []
    for done in range(len(held) + 1):
        if done:
            c = held[done - 1]
            if places[c] is None:
                break
            full, left[c] = classes[c].modes[places[c]], left[c] - 1
            if (done - 1) % segment == 0:
                kept, whole, most = kept + full.saved_bytes, 0.0, 0.0
            whole, most = whole + classes[c].whole_bytes, max(most, full.transient_bytes - classes[c].whole_bytes)
            time_s, working = time_s + full.time_s, max(working, whole + most)
        if any(n and not modes for n, modes in zip(left, others, strict=True)):
            continue
        rest = _of_others(others, tuple(left))
        recomputed = [list(held[:done]).count(c) for c in range(len(classes))]
        found.append(Mixes(time_s + rest.time_s, kept + rest.kept_bytes, np.maximum(working, rest.transient_bytes),
                           _with_full(rest.choice, others, places, recomputed)))  # fmt: skip
    if not found:  # one class can only be recomputed whole, and stands behind one that cannot be
        none = np.zeros(0)
        return Mixes(none, none, none, np.zeros((0, sum(len(c.modes) for c in classes)), dtype=np.int64))
    fields = (np.concatenate([getattr(part, name) for part in found]) for name in Mixes.__dataclass_fields__)
    return _pareto(Mixes(*fields))


def _apart(layer: LayerClass) -> tuple[int | None, tuple[LayerMode, ...]]:
    """Where mode "full" stands among the modes of a class, and the other ones."""
    place = next((i for i, mode in enumerate(layer.modes) if mode.name == "full"), None)
    return place, tuple(mode for mode in layer.modes if mode.name != "full")


@lru_cache(maxsize=4096)
def _of_others(modes: tuple[tuple[LayerMode, ...], ...], counts: tuple[int, ...]) -> Mixes:
    """Useful mixes of so many layers of each class that are not recomputed whole."""
    if len(modes) > 1:
        return _pareto(merged(_of_others(modes[:-1], counts[:-1]), _of_others(modes[-1:], counts[-1:])))
    if not modes[0]:
        nothing = np.zeros(1)
        return Mixes(nothing, nothing, nothing, np.zeros((1, 0), dtype=np.int64))
    return _pareto(class_mixes(LayerClass(modes[0], 0.0), counts[0]))


def _with_full(
    choice: Counts, others: Sequence[Sequence[LayerMode]], places: Sequence[int | None], recomputed: Sequence[int]
) -> Counts:
    """Choices of the other modes, with a column for mode "full" of each class."""
    columns, first = [], 0
    for modes, place, n in zip(others, places, recomputed, strict=True):
        own = choice[:, first : first + len(modes)]
        first += len(modes)
        columns.append(own if place is None else np.insert(own, place, n, axis=1))
    return np.concatenate(columns, axis=1)


def useful_modes(modes: Sequence[LayerMode]) -> list[LayerMode]:
    """Modes that no other beats in time, bytes and working set: swapping it in is never worse."""

    def beats(a: LayerMode, b: LayerMode) -> bool:
        pairs = [(a.time_s, b.time_s), (a.saved_bytes, b.saved_bytes), (a.transient_bytes, b.transient_bytes)]
        return all(x <= y for x, y in pairs) and (any(x < y for x, y in pairs) or modes.index(a) < modes.index(b))

    # A segment makes "full" keep less and work in more than its own figures say: it neither beats nor is beaten.
    others = [m for m in modes if m.name != "full"]
    return [m for m in modes if m.name == "full" or not any(o is not m and beats(o, m) for o in others)]


def _hull(modes: Sequence[LayerMode]) -> list[LayerMode]:
    """The fastest mode, the one that keeps least, and the one between that frees most bytes a second."""
    fastest, leanest = min(modes, key=lambda m: m.time_s), min(modes, key=lambda m: m.saved_bytes)
    between = [m for m in modes if m not in (fastest, leanest)]
    best = min(between, key=lambda m: (m.time_s - fastest.time_s) / max(1.0, fastest.saved_bytes - m.saved_bytes))
    return [m for m in modes if m in (fastest, best, leanest)]


@lru_cache(maxsize=256)
def compositions(count: int, parts: int) -> Counts:
    """All ways to write `count` as an ordered sum of `parts` numbers; no row at all if there are too many."""
    if parts == 1:
        return np.array([[count]], dtype=np.int64)
    if not _number_of_compositions(count, parts):
        return np.zeros((0, parts), dtype=np.int64)
    if parts == 2:
        first = np.arange(count + 1)
        return np.stack([count - first, first], axis=1)
    blocks = []
    for last in range(count + 1):
        rest = compositions(count - last, parts - 1)
        blocks.append(np.concatenate([rest, np.full((len(rest), 1), last, dtype=np.int64)], axis=1))
    return np.concatenate(blocks)


def _number_of_compositions(count: int, parts: int) -> int:
    """Rows of `compositions`."""
    rows = math.comb(count + parts - 1, parts - 1)
    return 0 if rows > MOST_ROWS and parts > 3 else rows


def _segments(layers: Counts, segment: int, chunks: int) -> Counts:
    """Segments of `layers` recomputed layers that are spread evenly over the chunks."""
    each, more = layers // chunks, layers % chunks
    return more * -(-(each + 1) // segment) + (chunks - more) * -(-each // segment)


def _recomputed_whole(
    mode: LayerMode, layers: Counts, whole_bytes: float, segment: int, chunks: int
) -> tuple[Floats, Floats]:
    """(kept bytes, working bytes) of numbers of layers in mode "full"."""
    longest = np.minimum(-(-layers // chunks), segment)
    working = mode.transient_bytes + np.maximum(longest - 1, 0) * whole_bytes
    kept = (_segments(layers, segment, chunks) * mode.saved_bytes).astype(np.float64)
    return kept, np.where(layers > 0, working, 0.0).astype(np.float64)


def _pareto(mixes: Mixes) -> Mixes:
    """Rows that no other equals or beats in all three, by time; of equal ones the first."""
    time_s, kept, transient, choice = mixes.time_s, mixes.kept_bytes, mixes.transient_bytes, mixes.choice
    steps = np.rint(time_s / max(float(time_s.max(initial=0.0)) * (SAME - 1), 1e-300))
    order = np.lexsort((transient, kept, steps))
    time_s, kept, transient, choice = time_s[order], kept[order], transient[order], choice[order]
    keep = np.zeros(len(order), dtype=np.bool_)
    for level in np.unique(transient):
        inside = transient <= level
        held = np.where(inside, kept, np.inf)
        before = np.concatenate([[np.inf], np.minimum.accumulate(held)[:-1]])
        keep |= (transient == level) & (kept < before)
    return Mixes(time_s[keep], kept[keep], transient[keep], choice[keep])
