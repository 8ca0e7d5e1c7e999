"""Bytes of fused chains of a gated MLP block, worked out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.blocks import op_name
from autopar.cost_model.block_layout import replicated
from autopar.cost_model.block_measures import BlockFormulas
from autopar.cost_model.fusion import fused_bytes
from autopar.cost_model.op_facts import ElementSizes
from autopar.passes import prepare
from autopar.trace import trace

HIDDEN, FFN, BATCH, SEQ = 32, 96, 2, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, 64, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def chains() -> dict[str, tuple[float, float]]:
    """Op name -> (forward, backward) bytes in the first layer, fp32."""
    ids = torch.ones((BATCH, SEQ), dtype=torch.int64)
    traced = prepare(trace(Model(), {"input_ids": ids, "labels": ids.clone()}))
    first = traced.layers[0].index
    nodes = [n for n in traced.graph_module.graph.nodes if n.op != "output" and n.meta["segment"] == first]
    measures = BlockFormulas(traced, nodes, ElementSizes(torch.float32, torch.float32)).at(BATCH, SEQ)
    found = fused_bytes(nodes, replicated(nodes), measures, 1)
    return {op_name(node): moved for node, moved in found.items()}


def test_the_gate_reads_two_tensors_and_writes_one(chains: dict[str, tuple[float, float]]) -> None:
    tensor = BATCH * SEQ * FFN * 4
    assert chains["silu"] == (0.0, 0.0)  # carried by the product
    assert chains["mul"] == (3 * tensor, 5 * tensor)  # backward: gradient and both inputs in, two gradients out


def test_a_norm_and_the_sum_after_its_block_do_not_fuse(chains: dict[str, tuple[float, float]]) -> None:
    tensor = BATCH * SEQ * HIDDEN * 4
    norm, total = chains["layer_norm"], chains["add"]
    assert norm[0] == pytest.approx(2 * tensor + 2 * HIDDEN * 4)
    assert total == (3 * tensor, 3 * tensor)
