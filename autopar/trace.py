"""Capture an unmodified model as a torch.fx graph of ATen ops with symbolic batch and sequence.

`torch.export` in non-strict mode runs the user's own Python once on fake tensors; the result is a plain graph, re-run
exactly at other batch and sequence sizes. The user's model, its weights and its config are only read.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.utils._sympy.functions import FloorDiv, PythonMod
from torch.utils._sympy.functions import Mod as TorchMod

from autopar.binding import CallSignature, flat_names, forward_defaults, forward_parameters, forward_rest, forward_takes
from autopar.blocks import annotate
from autopar.capture_errors import refuse_effects
from autopar.errors import UnsupportedModelError
from autopar.example_call import cache_notice, example_arguments
from autopar.export import Exported, LossFn, export
from autopar.graph_walks import outputs_of
from autopar.input_dims import InputDims, how_read, input_dims, whole_inputs
from autopar.ir import InputSpec, ParameterSpec, TracedModel
from autopar.plain_graph import plain_graph, symbols_of
from autopar.plan import is_pattern

__all__ = ["BATCH", "SEQ", "trace"]

BATCH = sympy.Symbol("batch", integer=True, positive=True)
SEQ = sympy.Symbol("seq", integer=True, positive=True)


def trace(
    model: nn.Module,
    example: Any,
    *,
    loss_fn: LossFn | None = None,
    parameter_dtype: torch.dtype | None = None,
    training: bool | None = None,
    repeat_layers: bool = True,
) -> TracedModel:
    """Capture `model` called on `example`.

    parameter_dtype: what fp32 parameters compute in under mixed precision; the graph is that of the model cast to it,
    while `TracedModel.parameters` describe the user's own.

    example: a mapping of arguments by name, a sequence of positional arguments, or one object (tensor, dataclass) that
    is the only argument. Only shapes, dtypes and non-tensor values matter; which dims are batch and sequence is read
    off them by `autopar.input_dims`. Meta tensors will do.

    training: capture in training or in evaluation mode; None as the model is.
    repeat_layers: run equal layers once where that gives the same graph (autopar.repeated_layers); False runs all.
    Raises UnsupportedModelError with module path, reason and remedy.
    """
    start = time.perf_counter()
    arguments = example_arguments(model, example)
    leaves = flat_names(arguments)
    tensors = {n: v for n, v in leaves.items() if isinstance(v, torch.Tensor)}
    known = input_dims(tensors)
    accepted = frozenset(name for name in arguments if forward_takes(model, name))
    exported = partial(export, model, arguments, leaves, loss_fn, accepted, parameter_dtype, training=training)
    found = _exported(exported, repeat_layers, how_read(tensors, known))
    refuse_effects(found.program, tuple(tensors))

    parameters, buffers, ties = _state(model)
    _refuse_taken_names([*parameters, *buffers])
    graph_module = plain_graph(found.program, model, found.shell, leaves, found.layers)
    graph = graph_module.graph
    symbols = _roles(graph, known)
    _set_shapes(graph, symbols)
    inputs = _inputs(graph, known)
    segments = annotate(graph, parameters)
    outputs, out_spec, loss = _outputs(graph, found.program)
    return TracedModel(
        graph_module=graph_module,
        batch=BATCH,
        seq=SEQ,
        inputs=inputs,
        signature=_signature(model, leaves),
        outputs=outputs,
        out_spec=out_spec,
        loss=loss,
        segments=segments,
        parameters=parameters,
        buffers=buffers,
        ties=ties,
        fingerprint=_fingerprint(graph, parameters),
        seq_range=_seq_range(found.program, symbols, inputs, known),
        unknown_buffers=found.unknown_buffers,
        repeated_layers=found.repeated,
        notices=(*found.notices, *cache_notice(model), *whole_inputs(tensors, known)),
        capture_s=time.perf_counter() - start,
    )


def _exported(exported: Callable[..., Exported | None], repeat_layers: bool, how_inputs_were_read: str) -> Exported:
    """With equal layers run once where that may be; a refusal says beside its remedy how the inputs were read."""
    try:
        found = (exported(repeat=True) if repeat_layers else None) or exported(repeat=False)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(error.what, where=error.where, try_=error.try_ + how_inputs_were_read) from error
    assert found is not None
    return found


def _signature(model: nn.Module, leaves: Mapping[str, Any]) -> CallSignature:
    return CallSignature(
        parameters=forward_parameters(model),
        tensors=tuple(n for n, v in leaves.items() if isinstance(v, torch.Tensor)),
        constants={n: v for n, v in leaves.items() if not isinstance(v, torch.Tensor)},
        defaults=forward_defaults(model),
        rest=forward_rest(model),
    )


def _state(
    model: nn.Module,
) -> tuple[dict[str, ParameterSpec], dict[str, ParameterSpec], dict[str, str]]:
    """Unique parameters and buffers by canonical (first) name, and the other names of tied ones, by identity."""
    canonical: dict[int, str] = {}
    ties: dict[str, str] = {}
    parameters: dict[str, ParameterSpec] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in canonical:
            ties[name] = canonical[id(p)]
        else:
            canonical[id(p)] = name
            parameters[name] = ParameterSpec(name, tuple(p.shape), p.dtype, p.requires_grad)
    buffers = {n: ParameterSpec(n, tuple(b.shape), b.dtype, False) for n, b in model.named_buffers()}
    return parameters, buffers, ties


_OF_GRAPHS = frozenset(dir(fx.GraphModule({}, fx.Graph()))) - frozenset(dir(nn.Module()))


def _refuse_taken_names(names: Sequence[str]) -> None:
    """Tensors are looked up in a GraphModule under their names, where it has things of its own under some."""
    for name in names:
        if name.partition(".")[0] in _OF_GRAPHS:
            raise UnsupportedModelError(
                "torch.fx has something of its own under this name",
                where=name.partition(".")[0],
                try_="another name for this attribute of the model",
            )
        if any(map(is_pattern, name.split("."))):
            raise UnsupportedModelError(
                "in a plan this name is a pattern", where=name, try_="another name for the module"
            )


def _roles(graph: fx.Graph, known: Mapping[str, InputDims]) -> dict[sympy.Symbol, sympy.Symbol]:
    """Which symbols of the inputs' sizes are the batch and which the sequence."""
    roles: dict[sympy.Symbol, sympy.Symbol] = {}
    for node, dims in zip(_placeholders(graph), known.values(), strict=True):
        for dim in dims.sequence:
            roles |= dict.fromkeys(symbols_of(node.meta["val"], dim), SEQ)
        if dims.has_rows:
            roles |= dict.fromkeys(symbols_of(node.meta["val"], 0), BATCH)
    return roles


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _set_shapes(graph: fx.Graph, roles: Mapping[sympy.Symbol, sympy.Symbol]) -> None:
    """meta["shape"] and ["dtype"] from the fake values, every symbol replaced by `batch` or `seq`."""

    def size(dim: Any) -> Any:
        if not isinstance(dim, torch.SymInt):
            return int(dim)
        expression = _plain(dim.node.expr.xreplace(roles))
        return int(expression) if expression.is_Integer else expression

    def shape(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(size(d) for d in value.shape)
        if isinstance(value, list | tuple):
            return tuple(shape(v) for v in value)
        return None

    for node in graph.nodes:
        value = node.meta.get("val")
        node.meta["shape"] = shape(value)
        first = value[0] if isinstance(value, list | tuple) and value else value
        node.meta["dtype"] = first.dtype if isinstance(first, torch.Tensor) else None
        if isinstance(value, torch.SymInt):
            node.meta["size"] = size(value)


def _plain(expression: sympy.Expr) -> sympy.Expr:
    """Integer division and remainder in sympy's own words, which can be turned into functions."""
    division = expression.replace(FloorDiv, lambda a, b: sympy.floor(sympy.expand(a / b)))
    remainder = division.replace(PythonMod, lambda a, b: sympy.Mod(a, b))
    return remainder.replace(TorchMod, lambda a, b: sympy.Mod(a, b))


def _inputs(graph: fx.Graph, known: Mapping[str, InputDims]) -> tuple[InputSpec, ...]:
    inputs = []
    for node, dims in zip(_placeholders(graph), known.values(), strict=True):
        shape = node.meta["shape"]
        batch = 0 if dims.has_rows and shape[0] == BATCH else None
        seq = next((d for d, size in enumerate(shape) if size == SEQ), None)
        if dims.has_rows and batch is None:
            raise UnsupportedModelError(
                f"forward works for batch size {shape[0]} only",
                where=f"input {node.target}",
                try_="derive sizes from the inputs (x.shape[0]) instead of constants",
            )
        inputs.append(InputSpec(str(node.target), shape, node.meta["dtype"], batch, seq))
    return tuple(inputs)


def _outputs(graph: fx.Graph, exported: torch.export.ExportedProgram) -> tuple[tuple[str, ...], Any, int | None]:
    """Names of the flat outputs, the spec that rebuilds the user's type, and which one is the loss."""
    leaves = outputs_of(graph)
    spec = exported.call_spec.out_spec
    names = tuple(flat_names(spec.unflatten(range(len(leaves)))))
    scalars = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, fx.Node) and leaf.meta["shape"] == () and leaf.meta["dtype"].is_floating_point
    ]
    learnt = [i for i in scalars if leaves[i].meta["grad"]] or scalars
    return names, spec, _which_is_the_loss({names[i]: i for i in learnt})


def _which_is_the_loss(scalars: Mapping[str, int]) -> int | None:
    """`loss` of the outputs, or the one scalar that learns. Raises UnsupportedModelError if several might be meant."""
    if "loss" in scalars:
        return scalars["loss"]
    named = {name: i for name, i in scalars.items() if name.split(".")[-1] == "loss"} or dict(scalars)
    if len(named) > 1:
        raise UnsupportedModelError(
            f"several outputs might be the loss: {', '.join(named)}",
            where="forward",
            try_="name one `loss`, or pass loss_fn=lambda outputs, batch: ...",
        )
    return next(iter(named.values()), None)


def _seq_range(
    exported: torch.export.ExportedProgram,
    roles: Mapping[sympy.Symbol, sympy.Symbol],
    inputs: Sequence[InputSpec],
    known: Mapping[str, InputDims],
) -> tuple[int, int | None]:
    """Lengths the captured branches hold for. A sequence that export had to fix is a range of one length."""
    low, high = 1, None
    for symbol, bounds in exported.range_constraints.items():
        if roles.get(symbol) == SEQ:
            low = max(low, int(bounds.lower)) if int(bounds.lower) > 2 else low
            if bounds.upper.is_Integer and int(bounds.upper) < 2**31:
                high = int(bounds.upper) if high is None else min(high, int(bounds.upper))
    long = [(dims, i) for dims, i in zip(known.values(), inputs, strict=True) if dims.sequence]
    if not long:
        return 1, 1  # a row of an image, say, counts as one token
    fixed = {int(i.shape[d]) for dims, i in long if dims.has_rows for d in dims.sequence if isinstance(i.shape[d], int)}
    if fixed:  # one is enough: a loop over its tokens, say, was unrolled
        return min(fixed), min(fixed)
    return low, high


def _fingerprint(graph: fx.Graph, parameters: Mapping[str, ParameterSpec]) -> str:
    lines = [f"{n.op} {n.meta.get('key', n.target)} {n.meta.get('shape')} {n.meta.get('dtype')}" for n in graph.nodes]
    lines += [f"{p.name} {p.shape} {p.dtype}" for p in parameters.values()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
