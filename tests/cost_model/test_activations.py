"""Saved bytes read off the graph against what autograd really keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.cost_model.activations import kept_tensors, local_bytes
from autopar.cost_model.op_facts import ElementSizes
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.passes.native_gqa import native_gqa
from autopar.passes.prepare import copy_graph
from autopar.trace import trace
from tests import models


def measured_bytes(run: Callable[[], torch.Tensor], module: nn.Module) -> int:
    """Distinct storages that autograd packs during `run`, parameters left out."""
    held = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    total = sum(storages.values())
    loss.backward()  # type: ignore[no-untyped-call]
    return total


def predicted_bytes(traced: TracedModel, batch: int, seq: int) -> float:
    kept = kept_tensors(list(traced.graph_module.graph.nodes), ElementSizes(torch.float32, torch.float32))
    at = {traced.batch: batch, traced.seq: seq}
    elements = {tensor: float(tensor.elements.subs(at)) for tensor in kept}
    return local_bytes(kept, elements, {}, 1, frozenset(traced.parameters))


@pytest.mark.parametrize("name", ["tiny_gpt", "llama_tiny", "gpt2_tiny", "qwen3_tiny", "bert_tiny"])
def test_saved_bytes_match_autograd(name: str) -> None:
    model = getattr(models, name)(dtype=torch.float32)
    batch = models.default_batch()
    traced = prepare(trace(model, batch))
    rows, seq = batch["input_ids"].shape
    inputs = [batch[spec.name] for spec in traced.inputs]
    executed = native_gqa(copy_graph(traced.graph_module))

    def run() -> torch.Tensor:
        out = executed(*inputs)
        return out[traced.loss] if isinstance(out, tuple) else out

    actual, expected = measured_bytes(run, model), predicted_bytes(traced, rows, seq)
    assert expected == pytest.approx(actual, rel=0.005)
