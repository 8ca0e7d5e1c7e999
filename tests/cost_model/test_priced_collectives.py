"""What a step is priced for over tp is what `step_collectives` counts, and dry runs prove: kind, bytes and times."""

from __future__ import annotations

from collections import Counter

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar import passes
from autopar.cost_model.block_layout import BACKWARD, FORWARD, FORWARD_ONLY, ONCE_A_STEP
from autopar.cost_model.candidates import settings_of
from autopar.cost_model.search import Run, search
from autopar.cost_model.setting_price import SettingPrice
from autopar.cost_model.step_collectives import step_collectives
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.specs import ClusterSpec, Pins, TrainSpec
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
