"""Field case pt-01: which of tp, pp and dp goes across the slow link, with the numbers."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.cost_model.search import search
from autopar.hardware import DEVICES
from autopar.ir import TracedModel
from autopar.models import example_from_config
from autopar.passes import prepare
from autopar.reports.text import render
from autopar.specs import ClusterSpec, LinkSpec, Pins, TrainSpec
from autopar.trace import trace

TRAIN = TrainSpec(global_batch=32, seq_len=2048)


@pytest.fixture(scope="module")
def layers_of_13b() -> TracedModel:
    """Layers of a 13B model (hidden 5120), four of them, with a small vocabulary."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=5120, intermediate_size=13824, num_hidden_layers=4, num_attention_heads=40,
        num_key_value_heads=40, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return prepare(trace(model, example_from_config(config)))


def cluster_of(inside: float, between: float, per_node: int, nodes: int = 2) -> ClusterSpec:
    def link(name: str, span: int, bandwidth: float) -> LinkSpec:
        return LinkSpec(name=name, span=span, bandwidth=bandwidth, latency=2e-6)

    near = (link("nvlink", per_node, inside),) if per_node > 1 else ()
    total = per_node * nodes
    return ClusterSpec(name="boxes", device=DEVICES["a100-40g"], num_devices=total,
                       links=(*near, link("ethernet", total, between)))  # fmt: skip


def both_numbers(notices: tuple[str, ...]) -> tuple[float, float]:
    """(across, inside) seconds of a step, or the bound that is stated."""
    (note,) = [n for n in notices if "by the slow link ethernet" in n or "devices are joined by ethernet" in n]
    across, inside = re.findall(r"([\d.e+-]+) s a step", note)
    return float(across), float(inside)


def test_pt_01_tp_stays_inside_nodes(layers_of_13b: TracedModel) -> None:
    """2 nodes x 4 devices, 300 GB/s inside, 10 GB/s between: tp and cp groups never leave a node."""
    result = search(layers_of_13b, cluster_of(300e9, 10e9, 4), TRAIN)
    d = result.plan.degrees
    assert d.tp * d.cp <= 4
    assert d.dp * d.pp >= 2
    for rank in range(8):
        assert len({r // 4 for r in d.group("tp", rank)}) == 1
    across, inside = both_numbers(result.notices)
    assert inside <= across
    assert inside == pytest.approx(result.plan.prediction["step_time_s"], rel=1e-3)
    assert "ranks" in render(result.plan, result, notices=result.notices)


def test_pt_01_neighbour_groups_that_do_not_fill_a_node_evenly_are_across(layers_of_13b: TracedModel) -> None:
    """Five nodes of eight: some tp groups of five lie in two nodes, so the layout is one across the slow link."""
    result = search(layers_of_13b, cluster_of(300e9, 10e9, 8, nodes=5), TRAIN, Pins(tp=5))
    d = result.plan.degrees
    assert any(len({r // 8 for r in d.group("tp", rank)}) == 2 for rank in range(40))
    (note,) = [n for n in result.notices if "by the slow link ethernet" in n]
    assert f"across it {result.plan.prediction['step_time_s']:.4g} s a step" in note
    assert "inside it at least" in note


def test_pt_01_one_device_a_node(layers_of_13b: TracedModel) -> None:
    """Two boxes of one device: pp or dp is preferred to tp, and tp=2 stands beside it with its number."""
    cluster = cluster_of(0.0, 10e9, 1)
    result = search(layers_of_13b, cluster, TRAIN)
    assert result.plan.degrees.tp == 1
    across, inside = both_numbers(result.notices)
    assert not any("slow link" in notice for notice in result.notices), "no other link is faster"
    assert inside < across
    pinned = search(layers_of_13b, cluster, TRAIN, Pins(tp=2)).plan.prediction["step_time_s"]
    assert pinned >= across * (1 - 1e-3)
    assert pinned > result.plan.prediction["step_time_s"]


def test_pt_01_a_slower_link_never_helps_tp(layers_of_13b: TracedModel) -> None:
    """The same nodes with one bandwidth everywhere: every layout is at least as fast, and tp=8 loses least there."""
    slow, even = cluster_of(300e9, 10e9, 4), cluster_of(300e9, 300e9, 4)
    lost = []
    for pins in (Pins(), Pins(tp=8)):
        apart, alike = (search(layers_of_13b, c, TRAIN, pins).plan.prediction["step_time_s"] for c in (slow, even))
        assert alike <= apart * (1 + 1e-9)
        lost.append(apart / alike)
    assert lost[1] > lost[0]
