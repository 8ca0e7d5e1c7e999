"""What a step is priced for is what `step_collectives` counts, and dry runs prove: kind, bytes and times."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar import passes
from autopar.cost_model.block_layout import BACKWARD, FORWARD, FORWARD_ONLY, ONCE_A_STEP
from autopar.cost_model.candidates import settings_of
from autopar.cost_model.comm_cost import group_cost
from autopar.cost_model.search import Run, search
from autopar.cost_model.setting_price import SettingPrice
from autopar.cost_model.step_collectives import step_collectives
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.specs import ClusterSpec, LinkSpec, Pins, TrainSpec
from autopar.trace import trace
from tests import models

LAYERS = 3


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def traced(request: pytest.FixtureRequest) -> TracedModel:
    if request.param == "gpt2":
        config = GPT2Config(vocab_size=64, n_embd=32, n_layer=LAYERS, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
                            attn_pdrop=0.0)  # fmt: skip
        return prepare(trace(GPT2LMHeadModel(config).train(), models.default_batch()))
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    return prepare(trace(LlamaForCausalLM(config).train(), models.default_batch()))


def priced(price: SettingPrice, mode: str) -> Counter[tuple[str, int]]:
    """Of a micro-batch; recomputation repeats a whole forward but for what comes behind its end, or gathers alone."""
    tally: Counter[tuple[str, int]] = Counter()
    (layer,) = price.classes
    for unit, times, again in [(layer.unit, LAYERS, mode), *((unit, 1, "none") for _, unit in price.ends)]:
        for kind, whole, when in unit.work.collectives:
            repeated = when == FORWARD and (again == "full" or (again == "selective-ops" and kind == "all_gather"))
            if when in (FORWARD, FORWARD_ONLY, BACKWARD):
                tally[kind, round(whole)] += times * (1 + repeated)
    return tally


@pytest.mark.parametrize("mode", ["none", "selective", "selective-ops", "full"])
@pytest.mark.parametrize("sp", ["on", "off"])
def test_tp_collectives(traced: TracedModel, sp: str, mode: str) -> None:
    cluster = ClusterSpec.preset("local", 2)
    train = TrainSpec(global_batch=4, seq_len=16, precision="fp32")
    pins = Pins.parse(f"tp=2 sp={sp} microbatch=2 checkpoint={mode} checkpoint_segment=1".split())
    plan = search(traced, cluster, train, pins).plan
    price = _price_of(plan, Run(traced, cluster, train, pins), pins)
    found = step_collectives(passes.summed(traced, plan), plan, 0)
    counted = {(kind, nbytes): n for (purpose, kind, _, nbytes), n in found.items() if purpose == "activations"}
    assert {key: plan.micro_batches * n for key, n in priced(price, mode).items()} == counted
    once = sum(n for _, unit in [*((0, price.classes[0].unit),) * LAYERS, *price.ends]
               for _, n, when in unit.work.collectives if when == ONCE_A_STEP)  # fmt: skip
    assert once == sum(nbytes * n for (purpose, _, axis, nbytes), n in found.items()
                       if (purpose, axis) == ("gradients", "tp"))  # fmt: skip


def _price_of(plan: Plan, run: Run, pins: Pins) -> SettingPrice:
    chosen = (plan.schedule, plan.virtual_stages, plan.zero, plan.micro_batch)
    settings = (s for p in run.partitions for s in settings_of(p, run.limits, pins))
    return run.evaluator.price(
        next(s for s in settings if (s.schedule, s.virtual_stages, s.zero, s.micro_batch) == chosen)
    )


FREE = LinkSpec(name="loopback", span=12, bandwidth=1e9, latency=0.0, efficiency=1.0)
"""No latency, so that a price is the bytes that cross: messages may be cut in any way."""


@pytest.mark.parametrize(("mode", "zero"), [("none", 0), ("selective", 1), ("full", 3)])
@pytest.mark.parametrize("exchange", ["ring", "all-gather", "all-to-all"])
def test_cp_dp_and_pp_take_what_is_counted(traced: TracedModel, exchange: str, mode: str, zero: int) -> None:
    """On a machine that hides nothing, seconds of a step's exchanges, sums and gathers and of a middle stage's messages
    are those of the collectives that dry runs find, one by one."""
    cluster = replace(ClusterSpec.preset("local", 12), links=(FREE,))
    train = TrainSpec(global_batch=16, seq_len=16, precision="fp32")
    pins = Pins.parse(
        f"cp=2 pp=3 dp=2 microbatch=2 zero={zero} context_parallel={exchange} checkpoint={mode} schedule=1f1b "
        "checkpoint_segment=1".split()
    )
    plan = search(traced, cluster, train, pins).plan
    price = _price_of(plan, Run(traced, cluster, train, pins), pins)
    stage, m = 1, plan.micro_batches
    layer, tail = price.layer_parts(0, mode), price.tail_parts(stage, (1,))
    found = {"cp": m * layer["cp"], "dp": m * layer["dp"] + tail["dp"], "pp": m * price.send_s}
    counted = dict.fromkeys(found, 0.0)
    for (purpose, kind, axis, nbytes), n in step_collectives(passes.summed(traced, plan), plan, stage).items():
        if purpose != "control":
            group = group_cost(cluster, plan.degrees if axis in found else Degrees(pp=3, cp=4), axis.split()[-1])
            part = "cp" if purpose == "activations" else "pp" if axis == "pp" else "dp"
            counted[part] += n * group.seconds(kind, nbytes)
    assert found == pytest.approx(counted, rel=1e-6)
