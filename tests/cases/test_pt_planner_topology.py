"""pt-01, pt-03: which axis goes over the slow link; what lies behind the embedding counts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.api import find_plan
from autopar.cost_model.search_result import SearchResult
from autopar.models import example_from_config
from autopar.reports.quantities import seconds_text
from autopar.reports.text import render
from autopar.specs import ClusterSpec, LinkSpec, Pins, TrainSpec


def _cluster(nodes: int, per_node: int, inside: float, between: float) -> ClusterSpec:
    whole = ClusterSpec.preset("dgx-a100-80g", nodes=2)
    links = [LinkSpec(name="nvlink", span=per_node, bandwidth=inside, latency=2e-6)] if per_node > 1 else []
    if nodes > 1:
        links.append(LinkSpec(name="network", span=nodes * per_node, bandwidth=between, latency=5e-6))
    return dataclasses.replace(whole, num_devices=nodes * per_node, links=tuple(links))


def _search(cluster: ClusterSpec, hidden: int, layers: int, batch: int, seq: int, **pins: int) -> SearchResult:
    config = LlamaConfig(vocab_size=32000, hidden_size=hidden, intermediate_size=hidden * 27 // 10 // 64 * 64,
                         num_hidden_layers=layers, num_attention_heads=hidden // 128,
                         max_position_embeddings=seq)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    train = TrainSpec(global_batch=batch, seq_len=seq)
    return find_plan(model, cluster, train, example=example_from_config(config), pins=Pins(**pins))


def test_pt_01_tensor_parallel_groups_stay_inside_nodes() -> None:
    """Layers as wide as those of 13B, two nodes of four with a slow link between them."""
    result = _search(_cluster(2, 4, 300e9, 10e9), 5120, 8, 32, 2048)
    degrees = result.plan.degrees
    assert degrees.tp <= 4
    assert 4 % degrees.tp == 0
    assert degrees.pp * degrees.dp * degrees.cp >= 2
    across = _search(_cluster(2, 4, 300e9, 10e9), 5120, 8, 32, 2048, tp=8)
    assert across.plan.prediction["step_time_s"] > 1.5 * result.plan.prediction["step_time_s"]


def test_pt_01_one_device_a_node() -> None:
    result = _search(_cluster(2, 1, 0, 10e9), 5120, 4, 32, 2048)
    assert result.plan.degrees.tp == 1
    assert result.plan.degrees.pp * result.plan.degrees.dp == 2
    tensor = [other for other in result.alternatives if other.degrees.tp == 2 and other.step_time_s is not None]
    assert tensor
    best = min(other.step_time_s or 0.0 for other in tensor)
    assert best > result.plan.prediction["step_time_s"]
    text = render(result.plan, result)
    assert seconds_text(result.plan.prediction["step_time_s"]) in text
    assert seconds_text(best) in text


def test_pt_03_the_batch_stays_cut_through_the_embedding() -> None:
    """32 sequences of 8192 tokens, width 4096, 8 devices: behind the embedding 2 GB in 16 bits, whole on one device."""
    result = _search(_cluster(1, 8, 300e9, 25e9), 4096, 4, 32, 8192)
    degrees = result.plan.degrees
    cut = degrees.dp * degrees.cp * (degrees.tp if result.plan.sequence_sharding else 1)
    micro = result.plan.micro_batch * 8192 * 4096 * 2 / degrees.cp
    assert degrees.dp * degrees.cp > 1 or result.plan.sequence_sharding
    assert cut >= 2
    first = dict(result.plan.prediction["peak_memory_bytes"][0])
    assert first["activations"] >= micro / (degrees.tp if result.plan.sequence_sharding else 1)


@pytest.mark.parametrize("between", [10e9, 300e9])
def test_pt_01_neighbour_the_link_decides_what_tensor_parallel_costs(between: float) -> None:
    """Over equal links tp 8 costs little more than tp 4 in each node; over a slow one it is far behind."""
    times = [
        _search(_cluster(2, 4, 300e9, between), 5120, 4, 32, 2048, tp=tp).plan.prediction["step_time_s"]
        for tp in (4, 8)
    ]
    assert (times[1] / times[0] > 1.5) == (between == 10e9)
