"""ppp-02, pf-03: stages of unequal cost as the search cuts them, and the idle time that it predicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cost_model.schedule_sim import StageTime, simulate
from autopar.cost_model.search import search
from autopar.cost_model.search_result import SearchResult
from autopar.hardware import preset
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.reports.quantities import percent_text, seconds_text
from autopar.reports.text import render
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from tests import models

LAYERS, DIM = 8, 128


def compute_only(devices: int) -> ClusterSpec:
    """Nothing but arithmetic takes time."""
    local = preset("local", devices)
    links = tuple(replace(link, bandwidth=1e18, latency=0.0) for link in local.links)
    return replace(local, links=links, device=replace(local.device, launch_s=0.0, memory_bandwidth=1e18))


def planned(vocab: int, pp: int, micro_batches: int, *texts: str) -> SearchResult:
    with torch.device("meta"):
        model = models.TinyGPT(layers=LAYERS, dim=DIM, heads=8, vocab=vocab)
    pins = Pins.parse([f"pp={pp}", "dp=1", "tp=1", "cp=1", "microbatch=1", *texts])
    traced = prepare(trace(model, models.default_batch()))
    return search(traced, compute_only(pp), TrainSpec(global_batch=micro_batches, seq_len=16), pins)


def test_ppp_02_a_heavy_head_leaves_its_stage_few_layers() -> None:
    """The head costs 2.3 layers: the slowest stage takes 3.3, where two layers and the head would take 4.3. The report
    says what each stage costs, here and from the file."""
    result = planned(28 * DIM, 4, 16, "schedule=1f1b")
    plan, prediction = result.plan, result.plan.prediction
    sizes = [len(paths) for paths in plan.layer_paths()]
    step_s, busy = prediction["step_time_s"], prediction["stage_busy"]
    seconds = [part * step_s / plan.micro_batches for part in busy]
    layer_s = seconds[1] / sizes[1]
    assert sizes[-1] == 1
    assert 2 < seconds[-1] / layer_s - 1 < 2.5
    assert max(seconds) == pytest.approx(seconds[-1])
    assert all(s == pytest.approx(n * layer_s) for s, n in zip(seconds[:-1], sizes[:-1], strict=True))
    assert step_s == pytest.approx((plan.micro_batches - 1) * max(seconds) + sum(seconds))
    simulated = simulate("1f1b", [StageTime(s / 3, 2 * s / 3) for s in seconds], plan.micro_batches)
    assert simulated.step_s == pytest.approx(step_s, rel=0.02)
    for told in (plan, Plan.loads(plan.dumps())):
        rows = render(told).partition("Layers")[2].splitlines()[4:8]
        for row, part in zip(rows, busy, strict=True):
            assert percent_text(part) in row
            assert seconds_text(part * step_s) in row


@pytest.mark.parametrize(
    ("pp", "micro_batches", "texts", "idle"),
    [(4, 4, ("schedule=1f1b",), 0.429), (4, 8, ("schedule=1f1b",), 0.273), (2, 1, ("schedule=gpipe",), 0.5),
     (4, 8, ("schedule=interleaved", "virtual_stages=2"), 0.158)],
    ids=str,
)  # fmt: skip
def test_pf_03_the_cost_model_predicts_the_idle_time(
    pp: int, micro_batches: int, texts: tuple[str, ...], idle: float
) -> None:
    prediction = planned(2, pp, micro_batches, "checkpoint=none", *texts).plan.prediction
    assert prediction["time_s"]["bubble"] / prediction["step_time_s"] == pytest.approx(idle, abs=0.002)
    assert prediction["stage_busy"] == pytest.approx([1 - idle] * len(prediction["stage_busy"]), abs=0.002)
