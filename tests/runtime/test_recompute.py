"""What a recomputed layer holds between forward and backward, and what it runs a second time."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.blocks import op_name
from autopar.cost_model.op_facts import numel
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.passes import apply, prepare
from autopar.plan import Plan
from autopar.recomputation import attention_cores, kept_products
from autopar.runtime.recompute import CheckpointedBlock, keep_output
from autopar.runtime.stage import localize
from autopar.trace import trace
from tests import models, plans

PATHS = {"llama": "model.layers", "gpt2": "transformer.h", "tiny_gpt": "blocks"}


class _Storages(TorchDispatchMode):
    """Bytes of living storages made inside, and how often each op ran."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, int] = {}
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ran[func._schema.name.partition("::")[2]] += 1
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self.living:
                storage = leaf.untyped_storage()
                self.living[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.living.pop, storage._cdata)
        return result


def _traced(family: str) -> TracedModel:
    return prepare(trace(models.BUILDERS[family](torch.float32), models.default_batch()))


def _plan(family: str, mode: str, segment: int = 1) -> Plan:
    plan = plans.megatron(family, Degrees(), precision="fp32")
    return plan.replace(checkpoint={f"{PATHS[family]}.*": mode}, checkpoint_segment=segment)


def _run(traced: TracedModel, plan: Plan) -> tuple[int, Counter[str]]:
    """(bytes that live when the forward is over, ops of the backward)."""
    (stage,) = apply(traced, plan)
    graph = localize(stage.graph_module, {}, {}, torch.device("cpu"))
    batch = models.default_batch()
    with _Storages() as storages:
        loss = graph(**{name: batch[name] for name in stage.inputs})[0]
        gc.collect()
        held = sum(storages.living.values())
        storages.ran.clear()
        loss.sum().backward()
    return held, storages.ran


def _layer_nodes(traced: TracedModel, index: int = 1) -> list[fx.Node]:
    return list(traced.nodes_of(traced.layers[index]))


def _bytes(traced: TracedModel, nodes: list[fx.Node]) -> int:
    at = {traced.batch: 8, traced.seq: 16}
    return sum(int(numel(n.meta["shape"]).subs(at)) * n.meta["dtype"].itemsize for n in nodes)


@pytest.fixture(scope="module")
def llama() -> TracedModel:
    return _traced("llama")


def test_bytes_kept_are_those_of_the_definition(llama: TracedModel) -> None:
    """To the byte: two runs that differ by the mode of one layer differ by what the definition says of it."""
    stream = _bytes(llama, [_layer_nodes(llama)[-1]])
    full, _ = _run(llama, _plan("llama", "full"))
    two = _plan("llama", "full").replace(checkpoint={"model.layers.1": "selective-ops", "model.layers.*": "full"})
    kept, unread = kept_products(_layer_nodes(llama))
    assert {n.meta["path"].rpartition(".")[2] for n in unread} == {"down_proj"}
    lse, stand_in = 4 * 8 * 4 * 16, 4  # of attention, fp32: rows x heads x tokens; a NaN
    assert _run(llama, two)[0] - full == _bytes(llama, sorted(kept)) + lse + stand_in
    segments = [_run(llama, _plan("llama", "full", k))[0] for k in (1, 2, 4)]
    assert segments == [full, full - 2 * stream, full - 3 * stream]


def test_selective_gives_up_the_attention_core_alone(llama: TracedModel) -> None:
    """Of a fused kernel that is the log-sum-exp, of written-out attention everything from scores to probabilities."""
    lse = 4 * 8 * 4 * 16
    assert _run(llama, _plan("llama", "none"))[0] - _run(llama, _plan("llama", "selective"))[0] == 4 * lse


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_second_run_makes_no_product_again(family: str) -> None:
    traced = _traced(family)
    once, again, twice = (_run(traced, _plan(family, mode))[1] for mode in ("none", "selective-ops", "full"))
    for kernel in ("mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert again[kernel] == once[kernel]
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (once[attention], twice[attention]) == (0, 4)
    assert twice["mm"] + twice["addmm"] > once["mm"] + once["addmm"]
    assert sum(again.values()) > sum(once.values())
    assert _run(traced, _plan(family, "selective"))[1][attention] == 4


def _gradients(traced: TracedModel, mode: str) -> list[Tensor | None]:
    layers = [s.path for s in traced.layers]
    batch = models.default_batch()
    plan = Plan(global_batch=8, seq_len=16, micro_batch=8, stages=(tuple(layers),), precision="fp64",
                checkpoint=dict.fromkeys(layers, mode), checkpoint_segment=2)  # fmt: skip
    (stage,) = apply(traced, plan)
    graph = localize(stage.graph_module, {}, {}, torch.device("cpu"))
    graph.zero_grad()
    graph(**{name: batch[name] for name in stage.inputs})[0].sum().backward()
    return [p.grad for p in graph.parameters()]


@pytest.mark.parametrize("family", ["gemma2", "t5", "bert", "mixtral", "neox", "encoder"])
def test_no_mode_changes_a_bit(family: str) -> None:
    """Attention written out, two attentions a layer, experts, layers side by side."""
    build = (models.BUILDERS | models.MORE_HF_BUILDERS)[family]
    traced = prepare(trace(build(), models.default_batch()))
    plain = _gradients(traced, "none")
    for mode in ("selective", "selective-ops", "full"):
        pairs = zip(plain, _gradients(traced, mode), strict=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in pairs), mode


def test_written_out_attention_is_found() -> None:
    traced = prepare(trace(models.gemma2_tiny(), models.default_batch()))
    (core,) = attention_cores(_layer_nodes(traced))
    names = [op_name(n) for n in core]
    assert (names[0], names[-1], names.count("softmax")) == ("matmul", "matmul", 1)
    kept, unread = kept_products(_layer_nodes(traced))
    assert core[-1] in kept
    assert core[0] not in kept | unread
    assert {n.meta["path"].rpartition(".")[2] for n in kept} >= {"q_proj", "o_proj", "down_proj"}  # norms read them


def test_a_routers_softmax_is_no_attention() -> None:
    traced = prepare(trace(models.mixtral_tiny(), models.default_batch()))
    assert [[op_name(n) for n in core] for core in attention_cores(_layer_nodes(traced))] == [
        ["scaled_dot_product_attention"]
    ]


def test_a_value_that_is_read_by_mistake_shows() -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    class Graph(torch.nn.Module):
        def forward(self, tape: Any, x: Tensor) -> Tensor:
            y: Tensor = keep_output(tape, torch.ops.aten.linear.default, x, weight, unread=True)
            return y * y  # keeps y

    out = CheckpointedBlock(Graph(), taped=True)(torch.randn(2, 4))
    out.sum().backward()
    assert out.isfinite().all()
    assert weight.grad is not None
    assert weight.grad.isnan().all()
