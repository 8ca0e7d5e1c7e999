"""Cutting a batch by rows: over dp ranks, then over micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import SpecError
from autopar.ir import InputSpec, TracedModel

__all__ = ["count_micro_batches", "cut_rows", "fitting", "pad_rows", "row_count"]


def fitting(traced: TracedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`batch` with narrower dtypes of a kind widened to the captured one. Raises SpecError where kinds or sizes are not
    those that the graph was captured for, before any rank runs it."""
    lengths: dict[str, int] = {}
    fitted = dict(batch)
    weights = {p.dtype for p in traced.parameters.values()}
    for spec in traced.inputs:
        x = batch.get(spec.name)
        if x is None:
            continue
        if (form := _form(x)) is not None:
            raise SpecError(f"input {spec.name} is {form[0]}", where="batch", try_=f"a plain tensor: {form[1]}")
        if x.dim() != len(spec.shape):
            raise _misfit(spec, f"{x.dim()} dims, captured with {len(spec.shape)}")
        for dim, (size, captured) in enumerate(zip(x.shape, spec.shape, strict=True)):
            if isinstance(captured, int) and size != captured:
                raise _misfit(spec, f"size {size} in dim {dim}, captured with {captured}")
            if captured == traced.seq:
                lengths[spec.name] = size
        fitted[spec.name] = _in_captured_dtype(spec, x, weights)
    _check_lengths(traced, lengths)
    return fitted


def _form(x: Tensor) -> tuple[str, str] | None:
    """What a tensor is that cannot be cut by rows, and how to make it one that can; None: nothing has to be done."""
    if isinstance(x, DTensor):
        return "a DTensor, of which a rank holds a part", "x.full_tensor()"
    if x.is_meta:
        return "on the meta device and holds no values", "one with values, on the CPU or the ranks' own device"
    if x.is_nested:
        return "nested, with rows of different lengths", "torch.nested.to_padded_tensor(x, padding)"
    return (f"in the layout {x.layout}", "x.to_dense()") if x.layout != torch.strided else None


def _check_lengths(traced: TracedModel, lengths: Mapping[str, int]) -> None:
    low, high = traced.seq_range
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {n}" for name, n in lengths.items())
        raise SpecError(
            f"inputs that were captured with sequences of one length differ: {listed}",
            where="batch",
            try_="pad them to one length, or capture with an example whose lengths differ",
        )
    for name, length in lengths.items():
        if length < low or (high is not None and length > high):
            raise SpecError(
                f"{name} has {length} tokens, and the captured graph holds for {low} to {high or 'any number'}",
                where="batch",
                try_="capture with an example of that length",
            )


def _misfit(spec: InputSpec, what: str, try_: str = "capture with an example of that size") -> SpecError:
    return SpecError(f"input {spec.name} has {what}", where="batch", try_=try_)


def _in_captured_dtype(spec: InputSpec, x: Tensor, weights: Collection[torch.dtype]) -> Tensor:
    """`x` widened within its kind (truth values are integers of one bit) to the dtype the program was captured for.

    Or `x` itself in the dtype of `weights` if the example had another: then the program goes by that of the weights."""
    kind, captured = _kind(x.dtype), _kind(spec.dtype)
    if x.dtype == spec.dtype or (kind == captured and x.dtype in weights and spec.dtype not in weights):
        return x
    same = kind == captured or (kind == "truth values" and captured == "integers")
    if same and torch.promote_types(x.dtype, spec.dtype) == spec.dtype:
        return x.to(spec.dtype)
    name = str(spec.dtype).removeprefix("torch.")
    raise SpecError(
        f"input {spec.name} holds {kind} ({x.dtype}), captured with {captured} ({spec.dtype})",
        where="batch",
        try_=f"{spec.name}.to(torch.{name}), or capture with an example of that dtype",
    )


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "truth values"
    if dtype.is_complex:
        return "complex numbers"
    return "floating-point numbers" if dtype.is_floating_point else "integers"


def row_count(inputs: Sequence[InputSpec], batch: Mapping[str, Tensor]) -> int:
    """Rows (sequences) of a batch. Raises SpecError if the inputs disagree or none has a batch dim."""
    rows = {s.name: batch[s.name].shape[s.batch_dim] for s in inputs if s.batch_dim is not None}
    if len(set(rows.values())) != 1:
        listed = ", ".join(f"{name} {n}" for name, n in rows.items()) or "none has a batch dim"
        raise SpecError(
            f"the inputs of a batch need the same number of rows: {listed}",
            where="batch",
            try_="inputs whose first dim counts the same sequences" if rows else "an example with several rows",
        )
    return next(iter(rows.values()))


def count_micro_batches(rows: int, dp: int, micro_batch: int) -> int:
    """Micro-batches each of `dp` ranks runs. Raises SpecError, naming legal row counts, if the rows do not divide."""
    unit = dp * micro_batch
    if rows == 0 or rows % unit:
        below = rows // unit * unit
        nearby = f"{below} or {below + unit}" if below else f"{unit}"
        parts = f"{dp} dp ranks x micro-batches of {micro_batch}" if dp > 1 else f"micro-batches of {micro_batch}"
        raise SpecError(
            f"{rows} rows do not divide into {parts}",
            where="batch",
            try_=f"{nearby} rows (any multiple of {unit}), or a plan with another micro_batch",
        )
    return rows // unit


def cut_rows(inputs: Sequence[InputSpec], batch: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """`parts` equal batches of consecutive rows; an input without batch dim goes whole into each."""
    if parts == 1:
        return [{s.name: batch[s.name] for s in inputs}]
    pieces = {
        s.name: [batch[s.name]] * parts if s.batch_dim is None else batch[s.name].chunk(parts, s.batch_dim)
        for s in inputs
    }
    return [{name: piece[i] for name, piece in pieces.items()} for i in range(parts)]


def pad_rows(
    inputs: Sequence[InputSpec], batch: Mapping[str, Tensor], rows: int, fill: Mapping[str, int]
) -> dict[str, Tensor]:
    """Batches with the last row repeated until there are `rows`; inputs in `fill` get its value instead.

    A real row is repeated because an invented one may be what a model turns into NaN, such as a fully masked one.
    """
    padded = dict(batch)
    for spec in inputs:
        if spec.batch_dim is None:
            continue
        x, dim = batch[spec.name], spec.batch_dim
        last = x.narrow(dim, x.shape[dim] - 1, 1)
        missing = rows - x.shape[dim]
        more = torch.full_like(last, fill[spec.name]) if spec.name in fill else last
        padded[spec.name] = torch.cat([x, *[more] * missing], dim)
    return padded
