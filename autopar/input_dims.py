"""Which dims of a call's tensors are the batch and the sequence, read off the shapes of one example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["InputDims", "how_read", "input_dims", "whole_inputs"]


@dataclass(frozen=True)
class InputDims:
    """Which dims of an input are the batch (dim 0, or none: the input goes whole to every part of a batch) and the
    sequence."""

    has_rows: bool
    sequence: tuple[int, ...]


def input_dims(tensors: Mapping[str, Tensor]) -> dict[str, InputDims]:
    """Batch and sequence dims of the inputs of a call.

    Token ids say what a row is: the first integer tensor [batch, seq]; without one, the first tensor of two dims or
    more. An input with as many rows as that has a row for each sequence. Images (four dims) have no sequence; of a mask
    [.., seq, seq] both dims are.
    """
    lead = _lead(tensors)
    rows = int(tensors[lead].shape[0]) if lead is not None else None
    seq = int(tensors[lead].shape[1]) if lead is not None and tensors[lead].dim() in (2, 3) else None
    return {
        name: InputDims(has_rows, _sequence_dims(t, seq, has_rows))
        for name, t in tensors.items()
        for has_rows in [bool(t.dim()) and rows in (None, t.shape[0])]
    }


def _sequence_dims(t: Tensor, seq: int | None, has_rows: bool) -> tuple[int, ...]:
    long = [d for d, size in enumerate(t.shape) if size == seq and d >= has_rows]
    if t.dim() > 3 or (t.dim() == 3 and t.shape[1] == 1):
        # A mask [batch, 1, queries or 1, keys or 1], or a table without rows; images have channels.
        mask = all(size in (1, seq) for size in t.shape[-2:]) and (t.dim() == 3 or not has_rows or t.shape[-3] == 1)
        return tuple(d for d in long if d >= t.dim() - 2) if mask else ()
    if has_rows and t.dtype.is_floating_point:
        return (1,) if 1 in long else ()  # [batch, seq, features], whatever the number of features
    return tuple(long)


def _lead(tensors: Mapping[str, Tensor]) -> str | None:
    """The input that says what rows and tokens are; one with a single row rather not: that may be any shared table."""
    wide = [name for name, t in tensors.items() if t.dim() >= 2]
    ids = [n for n in wide if tensors[n].dim() == 2 and _is_integer(tensors[n].dtype)]
    return next(iter([n for n in [*ids, *wide] if tensors[n].shape[0] > 1] or [*ids, *wide]), None)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def whole_inputs(tensors: Mapping[str, Tensor], known: Mapping[str, InputDims]) -> list[str]:
    """A sentence for every input that is not cut with the batch."""
    return [
        f"input {name} {[*t.shape]} has no row for each sequence: every part of a batch reads it whole"
        for name, t in tensors.items()
        if t.dim() and not known[name].has_rows
    ]


def how_read(tensors: Mapping[str, Tensor], known: Mapping[str, InputDims]) -> str:
    """What to add to advice where a model cannot be captured and it is not sure which inputs have rows."""
    doubtful = [
        f"input {name} {[*t.shape]} was taken to have a row for each sequence; if it has none, use an example with "
        "another number of rows"
        for name, t in tensors.items()
        if known[name].has_rows and (t.dim() == 1 or (t.shape[0] in t.shape[1:] and not _is_integer(t.dtype)))
    ]
    return "".join(f". Note: {note}" for note in (*whole_inputs(tensors, known), *doubtful))
