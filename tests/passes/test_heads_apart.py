"""Joined batch and heads are told apart, bit for bit, and only where they were joined."""

from __future__ import annotations

import pytest
import torch

from autopar.blocks import op_name
from autopar.passes import prepare
from autopar.trace import trace
from tests import models


def test_encoder_keeps_heads_in_a_dim_of_their_own() -> None:
    model, batch = models.encoder_classifier(), models.default_batch()
    traced = prepare(trace(model, batch))
    assert all(4 * traced.batch != d for n in traced.graph_module.graph.nodes for d in _dims(n.meta.get("shape")))
    for rows, seq in ((8, 16), (3, 5)):
        small = models.default_batch(rows, seq)
        assert torch.equal(traced.graph_module(*small.values())[0], model(**small))


def _dims(shape: object) -> tuple[object, ...]:
    return shape if isinstance(shape, tuple) else ()


@pytest.mark.parametrize("family", ["llama_tiny", "bert_tiny"])
def test_other_models_are_left_alone(family: str) -> None:
    traced = prepare(trace(getattr(models, family)(), models.default_batch()))
    assert not any(op_name(n) == "permute" for n in traced.graph_module.graph.nodes if n.op == "call_function")
