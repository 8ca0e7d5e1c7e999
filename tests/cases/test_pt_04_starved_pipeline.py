"""pt-04 (bigscience-workshop/bigscience#15): with a fixed global batch, more dp leaves a pipeline fewer micro-batches.

16 devices, batch 8, micro-batch 1, pp 4: dp 4 idles 0.60 of the step, dp 2 x tp 2 0.43, tp 4 0.27.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.api import find_plan
from autopar.cost_model.schedule_sim import StageTime, simulate
from autopar.cost_model.search_result import SearchResult
from autopar.errors import SpecError
from autopar.models import example_from_config
from autopar.reports.text import render
from autopar.specs import ClusterSpec, Pins, TrainSpec

IDLE = {(4, 1): 0.60, (2, 2): 0.43, (1, 4): 0.27}


@pytest.fixture(scope="module")
def result() -> SearchResult:
    # Wide layers and a small vocabulary: the stages are equal. Fast links, no launch cost and slow arithmetic: bound by
    # compute, so that what the host adds to a step is nothing beside it.
    config = LlamaConfig(
        vocab_size=32, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=16
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    cluster = ClusterSpec.preset("dgx-h100", nodes=2)
    fast = tuple(dataclasses.replace(link, bandwidth=1e18, latency=0.0) for link in cluster.links)
    slow = {dtype: rate / 1000 for dtype, rate in cluster.device.flops.items()}
    device = dataclasses.replace(cluster.device, launch_s=0.0, memory_bandwidth=1e18, flops=slow)
    cluster = dataclasses.replace(cluster, links=fast, device=device)
    # GPipe idles as 1F1B does, and runs with fewer micro-batches than stages too.
    pins = Pins(pp=4, cp=1, microbatch=1, checkpoint="none", schedule="gpipe", zero=0)
    train = TrainSpec(global_batch=8, seq_len=2048)
    return find_plan(model, cluster, train, example=example_from_config(config), pins=pins)


def test_idle_fractions_of_the_comparison(result: SearchResult) -> None:
    chosen = result.plan
    seen = {
        (chosen.degrees.dp, chosen.degrees.tp): chosen.prediction["time_s"]["bubble"] / chosen.prediction["step_time_s"]
    }
    for other in result.alternatives:
        assert other.step_time_s is not None
        seen.setdefault((other.degrees.dp, other.degrees.tp), other.time_s["bubble"] / other.step_time_s)
    assert {key: seen[key] for key in IDLE} == {key: pytest.approx(idle, abs=0.02) for key, idle in IDLE.items()}


def test_the_ranking_follows_the_idle_time(result: SearchResult) -> None:
    """For a model bound by compute all three do the same work; the fewer micro-batches the slower."""
    assert (result.plan.degrees.dp, result.plan.degrees.tp) == (1, 4)
    order = list(dict.fromkeys((c.degrees.dp, c.degrees.tp) for c in result.alternatives))
    assert order.index((2, 2)) < order.index((4, 1))


def test_the_report_shows_the_idle_share(result: SearchResult) -> None:
    text = render(result.plan, result, width=200)
    rows = text[text.index("The nearest alternatives") :]
    assert "idle" in rows
    assert re.search(r" (59|60)\.\d % ", rows)


@pytest.mark.parametrize(("dp", "micro_batches"), [(4, 2), (2, 4), (1, 8)])
def test_the_simulation_says_the_same(dp: int, micro_batches: int) -> None:
    idle = simulate("1f1b", [StageTime(1.0, 2.0)] * 4, micro_batches).idle_fraction
    assert idle == pytest.approx(IDLE[dp, 4 // dp], abs=0.005)


def test_a_batch_that_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="global batch of 8 sequences cannot be shared equally by dp 16"):
        Pins(dp=16).check(ClusterSpec.preset("dgx-h100", nodes=2), TrainSpec(global_batch=8, seq_len=2048))
    with pytest.raises(SpecError, match="microbatch 4 does not divide 8 / dp 4 = 2"):
        Pins(dp=4, microbatch=4).check(ClusterSpec.preset("dgx-h100", nodes=2), TrainSpec(global_batch=8, seq_len=2048))
