"""Field cases div-01 to div-04: heads, vocabularies and sequences that the tensor-parallel ranks do not divide."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.build import build
from autopar.cost_model.search import search
from autopar.dryrun import dry_run_captured
from autopar.errors import InfeasiblePlanError
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models, plans

TRAIN = TrainSpec(global_batch=8, seq_len=16, precision="fp64")


def _small(model: str, config: str, **sizes: Any) -> nn.Module:
    return models._hf(model, config, torch.float64, 0, **sizes)


def llama(heads: int, kv_heads: int, seq: int = 16) -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}
    model = _small("LlamaForCausalLM", "LlamaConfig", **{**models._LLAMA_SIZES, **sizes}, tie_word_embeddings=False)
    return model, models.default_batch(seq=seq)


def gpt2(vocab: int) -> tuple[nn.Module, dict[str, Any]]:
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    model = _small("GPT2LMHeadModel", "GPT2Config", vocab_size=vocab, n_positions=64, n_embd=32, n_layer=4, n_head=4,
                   **quiet)  # fmt: skip
    return model, odd_batch(vocab)


def odd_batch(vocab: int) -> dict[str, Tensor]:
    """The last token of the vocabulary is among them."""
    batch = models.default_batch()
    ids = batch["input_ids"].clamp(max=vocab - 1)
    ids[:, :3] = vocab - 1
    return {"input_ids": ids, "labels": ids.clone()}


class Smoothed(models.TinyGPT):
    """Untied head with a bias, label smoothing, scaled logits, a padding token."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab=vocab)
        self.head = nn.Linear(models.DIM, vocab)
        self.tokens = nn.Embedding(vocab, models.DIM, padding_idx=vocab - 1)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = 3.0 * torch.tanh(super().forward(input_ids) / 2.0)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def smoothed(vocab: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Smoothed(vocab).double().train(), odd_batch(vocab)


def _searched(factory: Any, pins: Pins, ranks: int) -> Plan:
    model, batch = factory()
    return search(prepare(trace(model, batch)), ClusterSpec.parse(f"local:{ranks}"), TRAIN, pins).plan


def _check(factory: Any, wanted: list[Plan], steps: int = 1, searched: Pins | None = None) -> None:
    """`wanted`, and what the search finds under the pins `searched`."""
    ranks = wanted[0].degrees.world_size
    planner = partial(_and_searched, wanted, searched, ranks)
    failed = [r.text() for r in verify_plans(factory, planner, ranks=ranks, steps=steps) if not r.passed]
    assert not failed, "\n\n".join(failed)


def _and_searched(wanted: list[Plan], pins: Pins | None, ranks: int, traced: TracedModel) -> list[Plan]:
    return wanted if pins is None else [*wanted, search(traced, ClusterSpec.parse(f"local:{ranks}"), TRAIN, pins).plan]


@pytest.mark.distributed
def test_div_01_fewer_key_value_heads_than_ranks() -> None:
    """Each rank has its query head and the key/value head that it shares with another rank."""
    layouts = [plans.megatron("llama", Degrees(tp=4), sequence_sharding=sp, micro_batch=4) for sp in (False, True)]
    _check(partial(llama, 4, 2), layouts, searched=Pins(tp=4))


@pytest.mark.distributed
def test_div_01_neither_divides_the_other() -> None:
    layout = plans.megatron("llama", Degrees(tp=2), micro_batch=4)
    _check(partial(llama, 6, 3), [layout], searched=Pins(tp=2))


def test_div_02_six_heads_on_four_devices() -> None:
    torch.manual_seed(0)
    model, batch = models.TinyGPT(dim=36, heads=6).double(), models.default_batch()
    traced = prepare(trace(model, batch))
    cluster = ClusterSpec.parse("local:4")
    found = search(traced, cluster, TRAIN)
    assert found.plan.degrees.tp in (1, 2)
    with pytest.raises(
        InfeasiblePlanError, match="tp=4 cannot shard the 6 attention heads.*the model allows 1, 2, 3, 6"
    ):
        search(traced, cluster, TRAIN, Pins(tp=4))


@pytest.mark.parametrize(
    ("texts", "seq", "rule"),
    [
        (["tp=2", "sp=true"], 15, "sp needs tp above 1 that divides a rank's part of the sequence"),
        (["cp=2", "context_parallel=all-to-all"], 16, "the attention runs over cp 2 by ring or all-gather;"),
        (["pp=2", "schedule=1f1b", "microbatch=8"], 16, "1f1b needs a micro-batch for every stage"),
        (["pp=2", "schedule=zero-bubble", "microbatch=8"], 16, "zero-bubble needs micro-batches in equal rounds"),
    ],
    ids=["sp", "exchange", "1f1b", "zero-bubble"],
)
def test_div_neighbour_the_rule_that_a_pin_breaks_is_told(texts: list[str], seq: int, rule: str) -> None:
    """Three key/value heads, on which no two ranks of cp can agree; and sequences and batches that pins do not cut."""
    train = TrainSpec(global_batch=8, seq_len=seq, precision="fp64")
    with pytest.raises(InfeasiblePlanError) as caught:
        search(_three_heads(), ClusterSpec.parse("local:2"), train, Pins.parse(texts))
    assert rule in caught.value.what
    assert "there would be plans" in caught.value.what


@cache
def _three_heads() -> TracedModel:
    return prepare(trace(*llama(6, 3)))


@pytest.mark.distributed
@pytest.mark.parametrize("vocab", [65, 63])
def test_div_03_vocabularies_that_do_not_divide(vocab: int) -> None:
    wanted = [plans.megatron("gpt2", Degrees(tp=2), sequence_sharding=sp, micro_batch=4) for sp in (False, True)]
    _check(partial(gpt2, vocab), wanted, steps=3, searched=Pins(tp=2))
    heads = {"tokens.weight": "S(0)", "head.weight": "S(0)", "head.bias": "S(0)"}
    layout = plans.megatron("tiny_gpt", Degrees(tp=2), micro_batch=4)
    _check(partial(smoothed, vocab), [layout.replace(parameters={**layout.parameters, **heads})])


@pytest.mark.distributed
@pytest.mark.slow
def test_div_03_with_other_axes_and_four_ranks() -> None:
    wanted = [
        plans.megatron("gpt2", d, micro_batch=2) for d in (Degrees(tp=2, pp=2), Degrees(tp=2, cp=2), Degrees(tp=4))
    ]
    zero = plans.megatron("gpt2", Degrees(tp=2, dp=2), micro_batch=2)
    _check(partial(gpt2, 65), [*wanted, zero, zero.replace(zero=3)])


def _padded_training(steps: int) -> dict[str, Any]:
    model, batch = gpt2(65)
    pm = build(model, prepare(trace(model, batch)), plans.megatron("gpt2", Degrees(tp=2), micro_batch=4))
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pm.step(batch).item())
        optimizer.step()
    local = dict(pm.named_parameters())["transformer.wte.weight"]
    assert local.grad is not None
    gradient = pm.full_gradients()["transformer.wte.weight"]
    assert gradient is not None
    return {
        "losses": losses,
        "state": pm.state_dict(),
        "filled": [local[-1].abs().max().item(), local.grad[-1].abs().max().item()],
        "norm": pm.clip_grad_norm_(1e9).item(),
        "shapes": [tuple(local.shape), tuple(gradient.shape), tuple(pm(**batch).logits.shape)],
    }


@pytest.mark.distributed
def test_div_03_twenty_steps_then_into_a_fresh_model() -> None:
    model, batch = gpt2(65)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    _, last = results = run_ranks(2, _padded_training, 20)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-6)
        assert result["norm"] == pytest.approx(norm, rel=1e-6)
        assert result["shapes"] == [(33, 32), (65, 32), (8, 16, 65)]
    assert last["filled"] == [0.0, 0.0]
    fresh, _ = gpt2(65)
    fresh.load_state_dict(last["state"])
    assert fresh.get_parameter("transformer.wte.weight").shape == (65, 32)
    torch.testing.assert_close(fresh(**batch).loss, model(**batch).loss, rtol=1e-6, atol=0)


def test_div_03_what_is_sent_is_as_predicted() -> None:
    model, batch = gpt2(65)
    plan = plans.megatron("gpt2", Degrees(tp=2, pp=2, dp=2), micro_batch=2)
    result = dry_run_captured(plan, prepare(trace(model, batch)))
    assert result.agrees, result.text()


def _lengths() -> dict[str, Any]:
    """Batches of other lengths than the plan was made for, under sequence sharding."""
    model, _ = llama(4, 2)
    classifier = models.encoder_classifier()
    batches = {seq: models.default_batch(seq=seq) for seq in (15, 3, 2)}
    pm = build(
        model, prepare(trace(model, models.default_batch())), plans.megatron("llama", Degrees(tp=2), micro_batch=4)
    )
    found: dict[str, Any] = {}
    for seq, batch in batches.items():
        for p in pm.parameters():
            p.grad = None
        loss = pm.step(batch).item()
        gradients = {n: g for n, g in pm.full_gradients().items() if g is not None}
        outputs = pm(**batch)
        found[str(seq)] = (loss, gradients, outputs.loss.item(), outputs.logits.detach())
    traced = prepare(trace(classifier, models.default_batch()))
    plan = _searched(encoder, Pins(tp=2, sp=True), 2)
    try:
        build(classifier, traced, plan).step(batches[15])
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent looks at it
        found["refused"] = f"{type(error).__name__}: {error}"
    return found


def encoder() -> tuple[nn.Module, dict[str, Any]]:
    return models.encoder_classifier(), models.default_batch()


@pytest.mark.distributed
def test_div_04_sequences_of_other_lengths_are_padded_unseen_or_refused() -> None:
    for result in run_ranks(2, _lengths):
        for seq in (15, 3, 2):
            model, batch = llama(4, 2, seq)
            reference = model(**batch)
            reference.loss.backward()
            loss, gradients, called, logits = result[str(seq)]
            assert loss == pytest.approx(reference.loss.item(), rel=1e-6)
            assert called == pytest.approx(reference.loss.item(), rel=1e-6)
            torch.testing.assert_close(logits, reference.logits, rtol=1e-6, atol=1e-7)
            for name, p in model.named_parameters():
                torch.testing.assert_close(gradients[name], p.grad, rtol=1e-6, atol=1e-7)
        assert "SpecError: batch: sequences of 15 tokens do not cut into the 2 parts" in result["refused"]


def _planned_odd() -> list[str]:
    model, batch = llama(4, 2, 15)
    plan = plans.megatron("llama", Degrees(tp=2), micro_batch=4).replace(seq_len=15)
    return build(model, prepare(trace(model, batch)), plan).notices


@pytest.mark.distributed
def test_div_04_planned_lengths() -> None:
    """S=15 and S=1: the stream stays whole, and a plan that asks for it sharded says so."""
    for seq in (15, 1):
        plan = plans.megatron("tiny_gpt", Degrees(tp=2), micro_batch=4).replace(seq_len=seq)
        _check(partial(unshifted, seq), [plan])
    for notices in run_ranks(2, _planned_odd):
        assert any("sequence_sharding has no effect: tp 2 does not divide the 15 tokens" in n for n in notices)


class Unshifted(models.TinyGPT):
    """A loss at every position, so that one token has one."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = super().forward(input_ids)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def unshifted(seq: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Unshifted().double().train(), models.default_batch(seq=seq)
