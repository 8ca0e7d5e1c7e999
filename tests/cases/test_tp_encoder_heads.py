"""nn.TransformerEncoder joins batch and heads in one dim; its attention is split over tp all the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cost_model.search import search
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.passes import apply, prepare
from autopar.placement import Shard
from autopar.plan import Plan
from autopar.runtime.recompute import CheckpointedBlock
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models

PARAMETERS = {
    "encoder.layers.*.self_attn.in_proj_weight": "S(0,left=3)",
    "encoder.layers.*.self_attn.in_proj_bias": "S(0,left=3)",
    "encoder.layers.*.self_attn.out_proj.weight": "S(1)",
    "encoder.layers.*.linear1.weight": "S(0)",
    "encoder.layers.*.linear1.bias": "S(0)",
    "encoder.layers.*.linear2.weight": "S(1)",
}


def encoder(batch_first: bool = True, norm_first: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    model = models.encoder_classifier()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    model.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).double()
    return model, models.default_batch()


def _traced() -> TracedModel:
    return prepare(trace(*encoder()))


def _plan(degrees: Degrees, **changes: Any) -> Plan:
    halves = [[f"encoder.layers.{i}" for i in part] for part in ((0, 1), (2, 3))]
    stages = halves if degrees.pp == 2 else [halves[0] + halves[1]]
    plan = Plan(degrees=degrees, global_batch=8, seq_len=16, micro_batch=4, stages=tuple(map(tuple, stages)),
                parameters=PARAMETERS, precision="fp64")  # fmt: skip
    return plan.replace(**changes)


def _attention_placements(plan: Plan) -> set[str]:
    found = set()
    for module in (m for stage in apply(_traced(), plan) for m in stage.graph_module.modules()):
        assert not isinstance(module, CheckpointedBlock)
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            if node.target is torch.ops.aten.scaled_dot_product_attention.default:
                found.add(str(node.meta["placement"]))
    return found


def test_heads_are_split_by_hand_and_by_search() -> None:
    assert _attention_placements(_plan(Degrees(tp=2))) == {str(Shard(1))}
    train = TrainSpec(global_batch=8, seq_len=16, precision="fp64")
    found = search(_traced(), ClusterSpec.parse("local:2"), train, Pins(tp=2)).plan
    assert _attention_placements(found) == {str(Shard(1))}
    assert found.parameters["encoder.layers.*.self_attn.in_proj_weight"] == "S(0,left=3)"


@pytest.mark.distributed
def test_it_trains_as_one_process() -> None:
    wanted = [
        _plan(Degrees(tp=2)),
        _plan(Degrees(tp=2), sequence_sharding=True),
        _plan(Degrees(tp=2), checkpoint={"encoder.layers.*": "selective-ops"}),
    ]
    results = verify_plans(encoder, wanted) + verify_plans(partial(encoder, True, True), wanted[1:2])
    failed = [r.text() for r in results if not r.passed]
    assert not failed, "\n\n".join(failed)
