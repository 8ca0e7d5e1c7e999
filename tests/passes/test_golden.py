"""Printed graph in, printed graph out, for every pass on one small model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from autopar.errors import PassError, PlanMismatchError
from autopar.ir import TracedModel
from autopar.passes.canonicalize import canonicalize
from autopar.passes.checkpoint_blocks import checkpoint_blocks
from autopar.passes.fold_masks import fold_masks
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.invariants import check_invariants
from autopar.passes.localize_shapes import localize_shapes
from autopar.passes.native_gqa import native_gqa
from autopar.passes.outline_blocks import outline_blocks
from autopar.passes.overlap_collectives import overlap_collectives
from autopar.passes.pipeline import apply
from autopar.passes.prepare import copy_graph, prepare
from autopar.passes.shard_parameters import shard_parameters
from autopar.passes.split_stages import split_stages
from autopar.passes.token_loss import sum_loss
from autopar.plan import Plan
from autopar.printing import format_graph
from autopar.runtime.recompute import CheckpointedBlock, keep_output
from autopar.trace import trace
from tests.passes.small import Small, small_plan, small_traced

Golden = Callable[[str, str], None]


def _captured() -> TracedModel:
    ids = torch.zeros(4, 8, dtype=torch.long)
    return trace(Small(layers=1), {"ids": ids, "labels": ids.clone()})


def _steps(plan: Plan, until: str) -> TracedModel:
    """`small_traced` after all passes up to and including `until`."""
    traced = small_traced()
    graph_module = sum_loss(copy_graph(traced.graph_module), traced, plan)
    traced = replace(traced, graph_module=graph_module)
    for name, rewrite in (
        ("sum_loss", lambda: graph_module),
        ("shard_parameters", lambda: shard_parameters(traced, plan)),
        ("insert_collectives", lambda: insert_collectives(graph_module, plan.degrees.tp)),
        ("localize_shapes", lambda: localize_shapes(graph_module, plan.degrees.tp)),
        ("overlap_collectives", lambda: overlap_collectives(traced, plan)),
        ("outline_blocks", lambda: outline_blocks(graph_module, traced.segments)),
        ("checkpoint_blocks", lambda: checkpoint_blocks(graph_module, traced.segments, plan)),
    ):
        rewrite()
        check_invariants(graph_module.graph, after=name)
        if name == until:
            return traced
    raise AssertionError(until)


def test_canonicalize(golden: Golden) -> None:
    traced = _captured()
    before = format_graph(traced.graph_module.graph)
    after = format_graph(canonicalize(copy_graph(traced.graph_module)).graph)
    golden("passes/canonicalize", f"# before\n{before}\n# after\n{after}")


def test_fold_masks(golden: Golden) -> None:
    traced = _captured()
    graph_module = fold_masks(canonicalize(copy_graph(traced.graph_module)), traced.inputs)
    golden("passes/fold_masks", format_graph(graph_module.graph))


def test_sum_loss(golden: Golden) -> None:
    golden("passes/sum_loss", format_graph(_steps(small_plan(), "sum_loss").graph_module.graph))


@pytest.mark.parametrize("sequence_sharding", [False, True])
def test_shard_parameters(golden: Golden, sequence_sharding: bool) -> None:
    traced = _steps(small_plan(sequence_sharding=sequence_sharding), "shard_parameters")
    golden(f"passes/shard_parameters_sp{int(sequence_sharding)}", format_graph(traced.graph_module.graph))


@pytest.mark.parametrize("sequence_sharding", [False, True])
def test_insert_collectives(golden: Golden, sequence_sharding: bool) -> None:
    traced = _steps(small_plan(sequence_sharding=sequence_sharding), "insert_collectives")
    golden(f"passes/insert_collectives_sp{int(sequence_sharding)}", format_graph(traced.graph_module.graph))


def test_localize_shapes(golden: Golden) -> None:
    golden("passes/localize_shapes", format_graph(_steps(small_plan(), "localize_shapes").graph_module.graph))


@pytest.mark.parametrize("name", ["tp_linear", "tp_ring"])
def test_overlap_collectives(golden: Golden, name: str) -> None:
    traced = _steps(small_plan(sequence_sharding=True).replace(overlap=(name,)), "overlap_collectives")
    golden(f"passes/overlap_collectives_{name}", format_graph(traced.graph_module.graph))
    assert traced.graph_module.meta["unapplied"] == ()


def test_outline_blocks(golden: Golden) -> None:
    graph_module = _steps(small_plan(), "outline_blocks").graph_module
    text = f"{format_graph(graph_module.graph)}\n# layers_0\n{format_graph(graph_module.layers_0.graph)}"
    golden("passes/outline_blocks", text)


@pytest.mark.parametrize("mode", ["selective", "selective-ops", "full"])
def test_checkpoint_blocks(golden: Golden, mode: str) -> None:
    plan = small_plan().replace(checkpoint={"layers.1": mode})
    graph_module = _steps(plan, "checkpoint_blocks").graph_module
    golden(f"passes/checkpoint_blocks_{mode}", "\n".join(_modules(graph_module)))
    assert isinstance(graph_module.layers_1, CheckpointedBlock) == (mode != "selective")


def test_checkpoint_segments_stay_inside_a_stage() -> None:
    plan = small_plan(tp=1).replace(checkpoint={"layers.*": "full"}, checkpoint_segment=2)
    (stage,) = apply(small_traced(), plan.replace(parameters={}))
    assert _modules(stage.graph_module)[:3] == [
        "segment_0: CheckpointedBlock of Block",
        "segment_0.layers_0: Block",
        "segment_0.layers_1: Block",
    ]
    assert {"segment_0.block.layers_1.layers.1.qkv.weight", "embed.weight"} <= set(stage.parameters)
    two = small_plan(tp=1, pp=2).replace(checkpoint={"layers.*": "full"}, checkpoint_segment=2, parameters={})
    for i, stage in enumerate(apply(small_traced(), two)):
        assert _modules(stage.graph_module) == [f"layers_{i}: CheckpointedBlock of Block"]


def _modules(graph_module: fx.GraphModule, prefix: str = "") -> list[str]:
    """Called modules by path and kind, and the graph of each that recomputes or holds one that does."""
    found = []
    for node in _calls(graph_module):
        module, name = getattr(graph_module, str(node.target)), f"{prefix}{node.target}"
        kind = type(module).__name__
        if isinstance(module, CheckpointedBlock):
            module, kind = module.block, f"{kind} of {type(module.block).__name__}"
        found.append(f"{name}: {kind}")
        inner = _modules(module, f"{name}.")
        keeps = any(n.target is keep_output for n in module.graph.nodes)
        found += inner + ([format_graph(module.graph)] if keeps or "attention" in name else [])
    return found


def _calls(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph_module.graph.nodes if n.op == "call_module"]


def test_split_stages(golden: Golden) -> None:
    plan = small_plan(pp=2)
    traced = _steps(plan, "checkpoint_blocks")
    stages = split_stages(traced.graph_module, traced, plan, ("loss_sum",))
    text = "\n".join(
        f"# stage {s.index}: receives {s.receives}, inputs {s.inputs}, sends {s.sends}, returns {s.outputs}\n"
        f"{format_graph(s.graph_module.graph)}"
        for s in stages
    )
    golden("passes/split_stages", text)


def test_gradients_of_replicated_parameters_are_marked_once_a_step() -> None:
    for sequence_sharding in (False, True):
        (stage,) = apply(small_traced(), small_plan(sequence_sharding=sequence_sharding))
        marked = {shard.name for shard in stage.parameters.values() if shard.grad_partial}
        norms = {f"layers.{i}.norm.{p}" for i in (0, 1) for p in ("weight", "bias")}
        assert marked == (norms if sequence_sharding else set())


def test_unreduced_sum_is_a_pass_error() -> None:
    traced = _steps(small_plan(), "insert_collectives")
    graph = traced.graph_module.graph
    converted = next(n for n in graph.nodes if n.name.startswith("convert") and n.args[1:] == ("P", "R"))
    converted.replace_all_uses_with(converted.args[0])
    with pytest.raises(PassError, match="lies as P"):
        check_invariants(graph, after="insert_collectives")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": (("layers.0",),)}, r"not listed: layers\.1"),
        ({"stages": (("layers.0-2",),)}, r"no such layer: layers\.2"),
        ({"stages": (("layers.1", "layers.0"),)}, "order differs"),
        ({"parameters": {"layers.*.qkv.weight": "S(0,left=5)"}}, "is not possible for shape"),
        ({"ops": {"layers.0.out::linear#0": "S(9) -> R"}}, "is not possible"),
        ({"fingerprints": {"model": "0"}}, "made for another model"),
    ],
)
def test_plan_that_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanMismatchError, match=message):
        apply(small_traced(), small_plan().replace(**change))


def test_each_pass_can_show_its_diff() -> None:
    shown: list[str] = []
    apply(small_traced(), small_plan(), show=shown.append)
    assert any("+%convert [batch, seq, 8] R = convert(%vocab_parallel_embedding, P, R, group=tp)" in s for s in shown)


class _Grouped(nn.Module):
    """Two key/value heads for four query heads, repeated by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_GroupedLayer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class _GroupedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 4, 2).transpose(1, 2)
        k, v = (p(x).view(b, s, 2, 2).transpose(1, 2) for p in (self.k, self.v))
        k, v = (t[:, :, None].expand(b, 2, 2, s, 2).reshape(b, 4, s, 2) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        z: torch.Tensor = x + self.o(y.transpose(1, 2).reshape(b, s, 8))
        return z


def test_native_gqa(golden: Golden) -> None:
    model = _Grouped().double()
    x = torch.rand(4, 6, 8, dtype=torch.float64)
    traced = prepare(trace(model, {"x": x}))
    wanted = traced.graph_module(x)[0]
    graph_module = native_gqa(copy_graph(traced.graph_module))
    golden("passes/native_gqa", format_graph(graph_module.graph))
    torch.testing.assert_close(graph_module(x)[0], wanted, rtol=1e-13, atol=1e-13)
