"""What autograd does for each op of a graph: which storages it keeps, what its backward makes.

Every node is lowered to the ops torch's autograd sees: a composite (rms norm, cross entropy) is several of them. Sizes
are plain bytes on one rank; a value is a storage, or a view of one. Rules follow torch's FunctionsManual.cpp and its
engine, and are checked against what a run on CPU holds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.op_facts import is_view
from autopar.graph_walks import repeated_for_attention

__all__ = ["AutogradOp", "Gradient", "Key", "Size", "lower"]

Key = Hashable
"""A value: a node of the graph, or (node, name) of what a composite makes inside."""


@dataclass(frozen=True)
class Gradient:
    """Gradient of one input. `nbytes` is its size, 0 for a view of the incoming gradient (or that itself); `made` what
    the op makes before it is summed to the input's shape, if that is more."""

    nbytes: float
    made: float = 0.0
    part: bool = False
    """One of the outputs of a split: kept beside the others until the split's own backward."""


@dataclass(frozen=True, kw_only=True)
class AutogradOp:
    """One op. `gradients` stand for the `inputs` (None: needs none); bytes in `kept_bytes` are its own (statistics)."""

    inputs: tuple[Key, ...]
    output: Key
    nbytes: float
    view: bool = False
    saves: tuple[Key, ...] = ()
    kept_bytes: float = 0.0
    forward_bytes: float = 0.0
    gradients: tuple[Gradient | None, ...] = ()
    backward_bytes: float = 0.0
    node: fx.Node = field(repr=False)

    @property
    def differentiable(self) -> bool:
        return any(g is not None for g in self.gradients)


Size = Callable[[fx.Node], float]
"""Local bytes of a node's output (all outputs together)."""


def lower(nodes: Sequence[fx.Node], size: Size) -> list[AutogradOp]:
    """The ops of call_function nodes; `size` gives the bytes a rank holds of each tensor."""
    repeats = {n: base for n in nodes if (base := repeated_for_attention(n)) is not None}
    return [op for node in nodes for op in _lower_one(node, size, repeats)]


def _lower_one(node: fx.Node, size: Size, repeats: Mapping[fx.Node, fx.Node]) -> list[AutogradOp]:
    name = op_name(node)
    if node.meta.get("dtype") is None:
        return []
    if name in _COMPOSITES:
        return _COMPOSITES[name](node, size)
    tensors = tuple(n for n in node.all_input_nodes if n.meta.get("dtype") is not None)
    tensors = tuple(repeats.get(n, n) for n in tensors) if name == "scaled_dot_product_attention" else tensors
    if node in repeats or (all(u in repeats for u in node.users) and name == "expand"):
        return []
    return [_single(node, name, tensors, size)]


def _single(node: fx.Node, name: str, tensors: tuple[fx.Node, ...], size: Size) -> AutogradOp:
    several = isinstance(node.meta["shape"][0] if node.meta["shape"] else None, tuple)
    out = 0.0 if several and not is_view(node) else size(node)  # its outputs are storages of their own
    rule = _VIEW if is_view(node) else _RULES.get(name, _DEFAULT)
    saves, kept, temporary = rule.kept(node, tensors, size)
    gradients = tuple(
        rule.gradient(node, i, n, size) if node.meta.get("grad") and n.meta.get("grad") else None
        for i, n in enumerate(tensors)
    )
    needed = any(g is not None for g in gradients)
    same = is_view(node) or name.endswith("_")  # no storage of its own: a view, or written in place
    if name == "getitem" and not is_view(tensors[0]):
        same = False
        if op_name(tensors[0]) == "topk" and node.args[1] == 1:
            out = 0.0  # the indices, which topk keeps
    return AutogradOp(
        inputs=tensors, output=node, nbytes=out, view=same and bool(tensors), saves=saves if needed else (),
        kept_bytes=kept if needed else 0.0, gradients=gradients, backward_bytes=temporary, node=node,
    )  # fmt: skip


Kept = tuple[tuple[Key, ...], float, float]
"""(values kept, own bytes kept, bytes the backward holds for a while beside its outputs)."""


@dataclass(frozen=True)
class _Rule:
    kept: Callable[[fx.Node, tuple[fx.Node, ...], Size], Kept]
    gradient: Callable[[fx.Node, int, fx.Node, Size], Gradient]


def _nothing(node: fx.Node, tensors: tuple[fx.Node, ...], size: Size) -> Kept:
    return (), 0.0, 0.0


def _first(node: fx.Node, tensors: tuple[fx.Node, ...], size: Size) -> Kept:
    return tensors[:1], 0.0, 0.0


def _output(node: fx.Node, tensors: tuple[fx.Node, ...], size: Size) -> Kept:
    return (node,), 0.0, 0.0


def _power(node: fx.Node, tensors: tuple[fx.Node, ...], size: Size) -> Kept:
    """grad * (exponent * x^(exponent - 1)): two temporaries beside the result."""
    return tensors[:1], 0.0, 2 * size(tensors[0])


def _others(node: fx.Node, tensors: tuple[fx.Node, ...], size: Size) -> Kept:
    """Each factor of a product if the other needs a gradient; a bias is no factor."""
    name = op_name(node)
    pair = tensors[1:3] if name in ("addmm", "baddbmm") else tensors[:2]
    if len(pair) < 2:
        return (pair if name == "mul" and sum(a is pair[0] for a in node.args) > 1 else ()), 0.0, 0.0
    a, b = pair
    kept = (*((a,) if b.meta.get("grad") else ()), *((b,) if a.meta.get("grad") else ()))
    return kept, 0.0, 0.0


def _attention(node: fx.Node, tensors: tuple[fx.Node, ...], size: Size) -> Kept:
    """Flash: q, k, v, the output, and a log-sum-exp in fp32 or wider a row."""
    wide = max(4, node.meta["dtype"].itemsize)
    return (*tensors[:3], node), size(node) / node.meta["dtype"].itemsize / _width(node) * wide, 0.0


def _layer_norm(node: fx.Node, tensors: tuple[fx.Node, ...], size: Size) -> Kept:
    wide = max(4, node.meta["dtype"].itemsize)
    return tensors[:1], 2 * size(node) / node.meta["dtype"].itemsize / _width(node) * wide, 0.0


def _width(node: fx.Node) -> float:
    return float(node.meta["shape"][-1])


def _indices(node: fx.Node, tensors: tuple[fx.Node, ...], size: Size) -> Kept:
    return tuple(n for n in tensors if not n.meta["dtype"].is_floating_point), 0.0, 0.0


def _mask(node: fx.Node, tensors: tuple[fx.Node, ...], size: Size) -> Kept:
    return tuple(n for n in tensors if n.meta["dtype"] == torch.bool), 0.0, 0.0


def _topk(node: fx.Node, tensors: tuple[fx.Node, ...], size: Size) -> Kept:
    """The indices, in int64."""
    return (), size(node) / node.meta["dtype"].itemsize / 2 * 8, 0.0


def _dropout(node: fx.Node, tensors: tuple[fx.Node, ...], size: Size) -> Kept:
    """On CPU the mask is kept in the activation's dtype, scaled already."""
    active = len(node.args) > 1 and bool(node.args[1]) and (len(node.args) < 3 or bool(node.args[2]))
    return (), size(node) if active else 0.0, 0.0


def _whole(node: fx.Node, index: int, source: fx.Node, size: Size) -> Gradient:
    return Gradient(size(source))


def _like_output(node: fx.Node, index: int, source: fx.Node, size: Size) -> Gradient:
    """Made in the output's shape, then summed to the input's."""
    return Gradient(size(source), made=size(node))


def _passed(node: fx.Node, index: int, source: fx.Node, size: Size) -> Gradient:
    """The incoming gradient itself, summed where the input was broadcast; negated for what is subtracted."""
    own = size(source) / source.meta["dtype"].itemsize
    whole = size(node) / node.meta["dtype"].itemsize
    if op_name(node) == "sub" and index == 1:
        return Gradient(size(source), made=size(node))
    return Gradient(0.0 if own == whole else size(source))


def _viewed(node: fx.Node, index: int, source: fx.Node, size: Size) -> Gradient:
    name = op_name(node)
    if name == "getitem":
        return Gradient(0.0, part=isinstance(source.meta["shape"][0] if source.meta["shape"] else None, tuple))
    fresh = name in ("slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind") or (
        name == "expand" and size(node) != size(source)
    )
    return Gradient(size(source) if fresh else 0.0)


def _spread(node: fx.Node, index: int, source: fx.Node, size: Size) -> Gradient:
    return Gradient(size(source) if op_name(node) == "mean" else 0.0)


_VIEW = _Rule(_nothing, _viewed)
_DEFAULT = _Rule(_nothing, _whole)
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "_grouped_mm",
                     "transformers.grouped_mm_fallback"),
                    _Rule(_others, _whole)),
    **dict.fromkeys(("mul", "div"), _Rule(_others, _like_output)),
    **dict.fromkeys(("div_", "mul_"), _Rule(_others, _like_output)),
    **dict.fromkeys(("add", "sub", "cat", "stack", "clone", "contiguous", "reshape", "flatten"),
                    _Rule(_nothing, _passed)),
    **dict.fromkeys(("silu", "gelu", "cos", "sin", "log", "abs", "softplus", "elu", "leaky_relu", "hardtanh", "clamp",
                     "relu6", "square"), _Rule(_first, _whole)),
    **dict.fromkeys(("rsqrt", "sqrt", "tanh", "exp", "sigmoid", "relu", "softmax", "_softmax", "log_softmax",
                     "reciprocal"), _Rule(_output, _whole)),
    "pow": _Rule(_power, _whole),
    "scaled_dot_product_attention": _Rule(_attention, _whole),
    **dict.fromkeys(("layer_norm", "native_layer_norm"), _Rule(_layer_norm, _whole)),
    **dict.fromkeys(("embedding", "index", "gather", "index_select"), _Rule(_indices, _whole)),
    **dict.fromkeys(("where", "masked_fill"), _Rule(_mask, _like_output)),
    **dict.fromkeys(("mean", "sum"), _Rule(_nothing, _spread)),
    "topk": _Rule(_topk, _whole),
    "dropout": _Rule(_dropout, _whole),
}  # fmt: skip


# --- composites -------------------------------------------------------------------------------------------------------


@dataclass
class _Chain:
    """Builds the ops of a composite: values are named inside, the last one is the node itself."""

    node: fx.Node
    ops: list[AutogradOp] = field(default_factory=list)

    def add(self, inputs: Sequence[Key], output: str | None, nbytes: float, gradients: Sequence[Gradient | None],
            saves: Sequence[Key] = (), kept: float = 0.0, temporary: float = 0.0) -> Key:  # fmt: skip
        key: Key = self.node if output is None else (self.node, output)
        grads = tuple(gradients) if self.node.meta.get("grad") else (None,) * len(inputs)
        needed = any(g is not None for g in grads)
        self.ops.append(AutogradOp(
            inputs=tuple(inputs), output=key, nbytes=nbytes, saves=tuple(saves) if needed else (),
            kept_bytes=kept if needed else 0.0, gradients=grads, backward_bytes=temporary, node=self.node))  # fmt: skip
        return key


def _rms_norm(node: fx.Node, size: Size) -> list[AutogradOp]:
    """to, pow, mean (+ eps), rsqrt, mul, to, mul: as `autopar.runtime.functional.rms_norm` runs it."""
    x, weight = node.all_input_nodes[:2]
    compute = node.kwargs.get("compute_dtype", node.args[3] if len(node.args) > 3 else None)
    own = size(node)
    elements = own / node.meta["dtype"].itemsize
    wide_size = compute.itemsize if isinstance(compute, torch.dtype) else x.meta["dtype"].itemsize
    wide_bytes, rows = elements * wide_size, elements / _width(node) * wide_size
    grad = Gradient if x.meta.get("grad") else lambda *a, **k: None
    chain = _Chain(node)
    casts = wide_size != x.meta["dtype"].itemsize
    wide: Key = chain.add([x], "wide", wide_bytes, [grad(own)]) if casts else x
    square = chain.add([wide], "square", wide_bytes, [grad(wide_bytes)], [wide], temporary=2 * wide_bytes)
    mean = chain.add([square], "mean", rows, [grad(wide_bytes)])
    root = chain.add([mean], "rsqrt", rows, [grad(rows)], [(node, "rsqrt")], temporary=2 * rows)
    factors = [grad(wide_bytes), grad(rows, made=wide_bytes)]
    normed = chain.add([wide, root], "normed", wide_bytes, factors, [wide, root])
    offset = bool(node.kwargs.get("unit_offset", len(node.args) > 4 and node.args[4]))
    scale = Gradient(size(weight), made=wide_bytes if offset else own) if weight.meta.get("grad") else None
    if offset:
        scaled = chain.add([normed, weight], "scaled", wide_bytes, [grad(wide_bytes), scale], [normed])
        chain.add([scaled], None, own, [grad(wide_bytes)])
        return chain.ops
    if casts:
        normed = chain.add([normed], "cast", own, [grad(wide_bytes)])
    chain.add([weight, normed], None, own, [scale, grad(own)], [normed])
    return chain.ops


def _cross_entropy(node: fx.Node, size: Size) -> list[AutogradOp]:
    """(to,) log_softmax, nll: the log-probabilities are kept; backward makes two more of their size."""
    logits, target = node.all_input_nodes[:2]
    own = size(logits)
    wide = own / logits.meta["dtype"].itemsize * max(4, logits.meta["dtype"].itemsize)
    chain = _Chain(node)
    grad = Gradient if logits.meta.get("grad") else lambda *a, **k: None
    source: Key = logits
    if wide != own:
        source = chain.add([logits], "wide", wide, [grad(own)])
    probabilities = chain.add([source], "log_probs", wide, [grad(wide)], [(node, "log_probs")])
    chain.add([probabilities, target], None, size(node), [grad(wide), None], [probabilities, target])
    return chain.ops


_COMPOSITES: Mapping[str, Callable[[fx.Node, Size], list[AutogradOp]]] = {
    "rms_norm": _rms_norm,
    "cross_entropy_loss": _cross_entropy,
    "cross_entropy_sum": _cross_entropy,
}
