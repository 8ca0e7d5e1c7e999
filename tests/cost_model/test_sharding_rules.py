"""Every strategy of every op is run: cut the arguments, run the op on each rank's part, put together, compare.

Values and gradients in fp64 against the whole op. This is the proof that a line of the rule table is true.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.blocks import op_name
from autopar.cost_model.sharding_rules import LOSSES, parse_rule, rule_of
from autopar.cost_model.strategy_table import Strategy, strategy_table, tensor_arguments
from autopar.cost_model.structural_rules import structural_rule
from autopar.passes import prepare
from autopar.passes.localize_shapes import localize_shapes
from autopar.placement import PARTIAL, Placement, Shard, parse_placement
from autopar.runtime.sharding import assemble, local_slice
from autopar.trace import trace
from tests import attention_styles
from tests.models import BUILDERS, MORE_HF_BUILDERS, default_batch

BATCH, SEQ, RANKS = 2, 8, 2


def _concrete(size: Any) -> int:
    if isinstance(size, int):
        return size
    return int(size.subs({s: {"batch": BATCH, "seq": SEQ}[s.name] for s in size.free_symbols}))


def _op_graph(node: fx.Node, strategy: Strategy | None) -> fx.GraphModule:
    """The op alone as a graph of its tensor arguments, shape arguments local to `strategy` if one is given."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for source in node.all_input_nodes:
        if source in tensor_arguments(node):
            copies[source] = graph.placeholder(source.name)
            copies[source].meta = {"shape": source.meta["shape"], "segment": 0}
        else:
            copies[source] = _concrete(source.meta["size"])
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
    result = graph.call_function(node.target, tuple(args), kwargs)
    result.meta = {"shape": node.meta["shape"], "segment": 0, "placement": strategy.output if strategy else None}
    graph.output(result)
    module = fx.GraphModule(torch.nn.Module(), graph)
    return localize_shapes(module, RANKS) if strategy else module


def _random(node: fx.Node) -> Tensor:
    shape = [_concrete(d) for d in node.meta["shape"]]
    dtype = node.meta["dtype"]
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    if dtype.is_complex:
        return torch.rand(shape, dtype=torch.complex128)
    if not dtype.is_floating_point:
        return torch.randint(0, 2, shape, dtype=dtype)
    return torch.rand(shape, dtype=torch.float64) + 0.5


def _parts(whole: Tensor, placement: Placement) -> list[Tensor]:
    """What each rank holds; a partial sum is cut into random summands."""
    if placement.is_partial:
        first = torch.randn_like(whole)
        return [first, whole - first]
    return [local_slice(whole, placement, r, RANKS).clone() for r in range(RANKS)]


def _gradient_kind(placement: Placement) -> Placement:
    """How the gradient of a tensor lies when its value lies as `placement`."""
    kinds = {"R": parse_placement("R"), "R|P": PARTIAL, "P": parse_placement("R")}
    return placement if placement.is_shard else kinds[placement.kind]


def _limit(node: fx.Node) -> float:
    """Some models cast to fp32 inside an op, or cast a sum that is then partial."""
    arguments = [*node.args, *node.kwargs.values(), *(t.meta["dtype"] for t in (node, *tensor_arguments(node)))]
    return 1e-5 if any(a is torch.float32 for a in arguments) else 1e-12


def _same(parts: list[Tensor], placement: Placement, whole: Tensor, limit: float) -> None:
    if placement.is_replicated:
        for part in parts:
            torch.testing.assert_close(part, whole, rtol=limit, atol=limit)
    torch.testing.assert_close(assemble(parts, placement), whole, rtol=limit, atol=limit)


def check_strategy(node: fx.Node, strategy: Strategy) -> None:
    """Fail unless the strategy computes the op's value and gradients."""
    tensors = tensor_arguments(node)
    wholes = [_random(t).requires_grad_(t.meta["grad"]) for t in tensors]
    outputs = _as_list(_op_graph(node, None)(*wholes))
    gradients = [torch.rand_like(o) if o.requires_grad else torch.zeros_like(o) for o in outputs]
    differentiable = any(o.requires_grad for o in outputs)
    flows = [i for i, o in enumerate(outputs) if o.requires_grad]
    sources = [w for w in wholes if w.requires_grad]
    sums = ([outputs[i] for i in flows], sources, [gradients[i] for i in flows])
    wanted = torch.autograd.grad(*sums) if differentiable else ()

    placements = [p for p in strategy.inputs if p is not None]
    local = [_parts(w.detach(), p) for w, p in zip(wholes, placements, strict=True)]
    local_gradients = {i: _parts(gradients[i], _gradient_kind(strategy.output)) for i in flows}
    graph = _op_graph(node, strategy)
    values: list[list[Tensor]] = []
    found: list[list[Tensor]] = []
    for rank in range(RANKS):
        mine = [part[rank].requires_grad_(w.requires_grad) for part, w in zip(local, wholes, strict=True)]
        out = _as_list(graph(*mine))
        values.append([o.detach() for o in out])
        if differentiable:
            sources = [m for m in mine if m.requires_grad]
            mine_g = [local_gradients[i][rank] for i in flows]
            found.append(list(torch.autograd.grad([out[i] for i in flows], sources, mine_g)))
    for i, output in enumerate(outputs):
        _same([v[i] for v in values], strategy.output, output.detach(), _limit(node))
    kinds = [_gradient_kind(p) for p, w in zip(placements, wholes, strict=True) if w.requires_grad]
    for i, (kind, gradient) in enumerate(zip(kinds, wanted, strict=differentiable)):
        _same([f[i] for f in found], kind, gradient, _limit(node))


def _as_list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _communicates(node: fx.Node, strategy: Strategy) -> bool:
    """Strategies whose rewritten kernel talks to other ranks; their tests run on several processes."""
    name, first = op_name(node), strategy.inputs[0]
    vocab = name in LOSSES or (name == "embedding" and strategy.output.is_partial)
    return vocab and first is not None and first.is_shard


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "bert", "t5", "encoder", "gemma2", "neox", "mixtral"])
def test_every_strategy_computes_the_op(family: str) -> None:
    assert _check_every_strategy({**BUILDERS, **MORE_HF_BUILDERS}[family]()) > 15


def test_every_strategy_of_hand_written_attention_computes_the_op() -> None:
    assert _check_every_strategy(attention_styles.Model().double()) > 40


def _check_every_strategy(model: torch.nn.Module) -> int:
    """Check every strategy of every different op of a model; how many ops these are."""
    traced = prepare(trace(model, default_batch()))
    table = strategy_table(traced, RANKS, SEQ)
    checked: set[str] = set()
    for segment in traced.segments:
        for node in traced.nodes_of(segment):
            if node not in table or not tensor_arguments(node) or op_name(node) in ("getitem", "empty_like"):
                continue
            shapes = [t.meta["shape"] for t in tensor_arguments(node)]
            constants = [a for a in node.args if not isinstance(a, fx.Node)]
            signature = f"{op_name(node)} {shapes} {node.meta['shape']} {constants}"
            if signature in checked:
                continue
            checked.add(signature)
            for strategy in table[node]:
                if not _communicates(node, strategy):
                    check_strategy(node, strategy)
    return len(checked)


def _linear_node(bias: bool) -> fx.Node:
    graph = fx.Graph()
    arguments = []
    for name, shape in (("x", (BATCH, SEQ, 4)), ("w", (6, 4)), ("b", (6,))):
        node = graph.placeholder(name)
        node.meta = {"shape": shape, "dtype": torch.float64, "grad": True}
        arguments.append(node)
    node = graph.call_function(torch.ops.aten.linear.default, tuple(arguments if bias else arguments[:2]))
    node.meta = {"shape": (BATCH, SEQ, 6), "dtype": torch.float64, "grad": True}
    return node


@pytest.mark.parametrize(
    ("bias", "text"),
    [
        (True, "S(2), S(1), R -> P"),  # the bias would be added once a rank
        (True, "S(2), S(1), R|P -> P"),
        (False, "R, S(0) -> S(2)"),  # the input's gradient would miss the other ranks' part
        (False, "S(1), R -> S(1)"),  # the weight's gradient would miss the other ranks' tokens
        (False, "P, R -> P"),
    ],
)
def test_a_wrong_strategy_is_caught(bias: bool, text: str) -> None:
    inputs, output = text.split(" -> ")
    strategy = Strategy(tuple(parse_placement(p) for p in inputs.split(", ")), parse_placement(output))
    with pytest.raises(AssertionError):
        check_strategy(_linear_node(bias), strategy)


def test_right_strategies_of_linear_pass() -> None:
    for text in ("S(2), S(1), P -> P", "R|P, S(0), S(0) -> S(2)", "S(1), R|P, R|P -> S(1)", "P, R|P, P -> P"):
        inputs, output = text.split(" -> ")
        check_strategy(
            _linear_node(True), Strategy(tuple(parse_placement(p) for p in inputs.split(", ")), parse_placement(output))
        )


def test_rule_text_reads_broadcast_dims() -> None:
    rule = parse_rule("..,..>..", ((2, 4, 8, 3), (1, 1, 8, 3)), (2, 4, 8, 3))
    assert rule is not None
    lacking = {letter.output for letter in rule.letters if letter.inputs[1] is None}
    assert lacking == {0, 1}


def test_fused_projection_is_found_without_a_pattern() -> None:
    traced = prepare(trace(BUILDERS["gpt2"](), default_batch()))
    table = strategy_table(traced, 2, SEQ)
    weight = next(n for n in traced.graph_module.graph.nodes if str(n.target) == "transformer.h.0.attn.c_attn.weight")
    assert Shard(1, left=3) in [s.output for s in table[weight]]


def test_number_added_to_a_partial_sum_is_not_offered() -> None:
    assert (PARTIAL,) not in _partials("add", 1)
    assert (PARTIAL,) in _partials("mul", 1)


def _partials(op: str, arguments: int) -> tuple[tuple[Placement, ...], ...]:
    from autopar.cost_model.sharding_rules import RULES

    rule = parse_rule(RULES[op], ((2, 4),) * arguments, (2, 4))
    assert rule is not None
    return rule.partial


def _node(target: Any, shape: tuple[int, ...], *arguments: Any) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta = {"shape": shape, "dtype": torch.float64, "grad": True}
    node = graph.call_function(target, (x, *arguments))
    node.meta = {"shape": shape, "dtype": torch.float64, "grad": True}
    return node


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_softmax_is_not_split_along_its_dim(dim: int) -> None:
    node = _node(torch.ops.aten.softmax.int, (2, 4, 6), dim)
    rule = structural_rule(node, tensor_arguments(node))
    assert rule is not None
    assert {letter.output for letter in rule.letters} == {0, 1, 2} - {dim % 3}
    assert rule.partial == ()
    for letter in rule.letters:
        placement = Shard(letter.output or 0)
        check_strategy(node, Strategy((placement,), placement))
    with pytest.raises(AssertionError):
        check_strategy(node, Strategy((Shard(dim % 3),), Shard(dim % 3)))


def test_norm_over_several_dims_has_no_rule() -> None:
    node = _node(torch.ops.aten.layer_norm.default, (2, 4, 6), [4, 6])
    assert rule_of(node, tensor_arguments(node)) is None
