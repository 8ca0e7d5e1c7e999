"""What stages (ranks) can hold: numbers of layers, runs of layers, or several chunks.

equal layers               only their number matters
several classes            every run of consecutive layers
and several chunks a rank  the layers divided evenly among the ranks, but for the first and the last, which hold the
                           ends of the model and any number; what a rank holds depends on what the others do, so the
                           cuts are listed one by one
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["StageRuns", "chunk_sizes", "stage_runs"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StageRuns:
    """What a stage holds has a number.

    counts    [number] layers of each class
    held      [number] the classes of a run's layers in order, where their order matters, else none
    least     fewest layers of a stage; of equal layers, numbers count from it
    ids       [i, j]: number of the layers [i, j), -1 where no stage can be that run; unused for equal layers
    shifts    [number, j]: where layer j - n stands in an array that begins with as many blanks as the largest stage has
              layers; for equal layers
    sizes     [cut, stage] layers, and `cuts` [cut, stage] what is held, where cuts are listed
    """

    counts: list[tuple[int, ...]]
    held: list[tuple[int, ...]]
    least: int
    ids: Ints
    shifts: Ints
    sizes: Ints | None = None
    cuts: Ints | None = None

    def numbers(self, sizes: list[int]) -> list[int]:
        """What each stage holds in the listed cut with these sizes."""
        assert self.sizes is not None
        assert self.cuts is not None
        row = int(np.flatnonzero((self.sizes == np.array(sizes)).all(axis=1))[0])
        return [int(number) for number in self.cuts[row]]


@lru_cache(maxsize=256)
def stage_runs(layers: tuple[int, ...], stages: int, classes: int, chunks: int = 1, ordered: bool = False) -> StageRuns:
    """`layers`: the class of every layer, in order; `ordered`: the order of a run's layers matters."""
    total, least = len(layers), chunks if layers else 0
    most = total - least * (stages - 1)
    if len(set(layers)) <= 1:
        first = layers[0] if total else 0
        counts = [tuple(n if c == first else 0 for c in range(classes)) for n in range(least, most + 1)]
        shifts = np.arange(len(counts))[::-1, None] + np.arange(total + 1)
        return StageRuns(counts, [], least, _NONE, shifts)
    return _listed(layers, stages, classes, chunks) if chunks > 1 else _consecutive(layers, most, classes, ordered)


_NONE = np.zeros((0, 0), dtype=np.int64)


def _prefix(layers: tuple[int, ...], classes: int) -> Ints:
    """[i, class]: layers of the class before layer i."""
    is_class = np.array(layers)[:, None] == np.arange(classes)
    return np.concatenate([np.zeros((1, classes), dtype=np.int64), np.cumsum(is_class, axis=0)])


def _consecutive(layers: tuple[int, ...], most: int, classes: int, ordered: bool) -> StageRuns:
    total, prefix = len(layers), [tuple(map(int, row)) for row in _prefix(layers, classes)]
    known: dict[tuple[int, ...], int] = {}
    counts: list[tuple[int, ...]] = []
    ids = np.full((total + 1, total + 1), -1, dtype=np.int64)
    for i in range(total):
        for j in range(i + 1, min(total, i + most) + 1):
            own = tuple(b - a for a, b in zip(prefix[i], prefix[j], strict=True))
            ids[i, j] = number = known.setdefault(layers[i:j] if ordered else own, len(known))
            if number == len(counts):
                counts.append(own)
    return StageRuns(counts, list(known) if ordered else [], 1, ids, _NONE)


def _listed(layers: tuple[int, ...], stages: int, classes: int, chunks: int) -> StageRuns:
    sizes = _sizes(len(layers), stages, chunks)
    ends = np.cumsum(chunk_sizes(sizes, chunks).reshape(len(sizes), -1), axis=1)
    before = _prefix(layers, classes)[np.concatenate([np.zeros((len(sizes), 1), dtype=np.int64), ends], axis=1)]
    held = np.diff(before, axis=1).reshape(len(sizes), chunks, stages, classes).sum(axis=1)
    counts, cuts = np.unique(held.reshape(-1, classes), axis=0, return_inverse=True)
    return StageRuns([tuple(map(int, row)) for row in counts], [], chunks, _NONE, _NONE, sizes,
                     cuts.reshape(len(sizes), stages))  # fmt: skip


def _sizes(total: int, stages: int, least: int) -> Ints:
    """[cut, stage]: layers of each stage, at least `least`; those between the first and the last have as many, or the
    earlier ones one more."""
    ends = total - least
    first, last = np.repeat(np.arange(least, total), ends), np.tile(np.arange(least, total), ends)
    middle, left = stages - 2, total - first - last
    keep = (left >= least * middle) if middle else left == 0
    first, last, left = first[keep], last[keep], left[keep]
    between = left[:, None] // max(1, middle) + (np.arange(middle) < (left % max(1, middle))[:, None])
    return np.concatenate([first[:, None], between, last[:, None]], axis=1)


def chunk_sizes(sizes: Ints, chunks: int) -> Ints:
    """[.., chunk, stage]: the layers of a rank spread evenly over its chunks."""
    return sizes[..., None, :] // chunks + (np.arange(chunks)[:, None] < sizes[..., None, :] % chunks)
