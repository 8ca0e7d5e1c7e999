"""Field cases cp-01 to cp-08: positions, labels, padding, masks and windows at the borders of a cut sequence."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.build import build
from autopar.errors import AutoparError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.passes.context_parallel import uses_zigzag
from autopar.plan import Plan
from autopar.runtime.attention import query_key_pairs
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models

BUILDERS = {**models.BUILDERS, **models.MORE_HF_BUILDERS}
KINDS = ("ring", "all-gather", "all-to-all")


def family(name: str, seq: int = 16, rows: int = 8) -> tuple[nn.Module, dict[str, Any]]:
    return BUILDERS[name](), models.default_batch(rows, seq)


def padded(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Rows of other lengths; padding ends before, on and after the chunk borders 4, 8 and 12."""
    model, batch = family(name)
    mask = (torch.arange(16) < torch.tensor([16, 3, 4, 5, 8, 9, 12, 13])[:, None]).long()
    return model, {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


@cache
def _layers(name: str) -> tuple[str, ...]:
    model, batch = family(name)
    return tuple(s.path for s in trace(model, batch).layers)


def _plan(name: str, degrees: Degrees = Degrees(cp=2), rows: int = 8, **changes: Any) -> Plan:
    plan = Plan(degrees=degrees, global_batch=rows, seq_len=16, micro_batch=min(4, rows), stages=(_layers(name),),
                precision="fp64")  # fmt: skip
    return plan.replace(**changes)


def _check(factory: Any, wanted: list[Plan], steps: int = 1) -> None:
    failed = [r.text() for r in verify_plans(factory, wanted, steps=steps) if not r.passed]
    assert not failed, "\n\n".join(failed)


def _called(name: str, seq: int = 16) -> Tensor:
    model, batch = family(name, seq)
    pm = build(model, prepare(trace(model, models.default_batch())), _plan(name))
    return pm(**batch).logits.detach()


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_cp_01_positions_are_those_of_the_whole_sequence(name: str) -> None:
    """Logits in the original order, also of a length that does not cut into four chunks."""
    for seq in (16, 13):
        model, batch = family(name, seq)
        wanted = model(**batch).logits
        for logits in run_ranks(2, _called, name, seq):
            torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=1e-7)


def one_row() -> tuple[nn.Module, dict[str, Any]]:
    return family("gpt2", seq=8, rows=1)


@pytest.mark.distributed
def test_cp_02_seven_targets_of_eight_tokens() -> None:
    """A wrong target at a border changes loss and gradients; the mean over 6 or 8 instead of 7 would too."""
    _check(one_row, [_plan("gpt2", rows=1, seq_len=8, context_parallel=kind) for kind in KINDS], steps=3)


@pytest.mark.distributed
@pytest.mark.parametrize("seq", [9, 13])
def test_cp_03_lengths_that_do_not_cut_into_chunks(seq: int) -> None:
    _check(partial(family, "llama", seq), [_plan("llama"), _plan("llama", context_parallel="all-gather")])


class Mean(nn.Module):
    """A loss without targets: padding would be averaged over."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = models.TinyGPT()

    def forward(self, input_ids: Tensor, goal: Tensor) -> Tensor:
        return F.mse_loss(self.gpt(input_ids), goal)


def _refusals() -> list[str]:
    """What is said of 13 tokens to attention that is not causal, and to a loss that cannot leave tokens out."""
    said = []
    torch.manual_seed(0)
    goal = torch.randn(8, 16, 64, dtype=torch.float64)
    mean_batch = {"input_ids": models.default_batch()["input_ids"], "goal": goal}
    cases = [
        (*family("bert"), ("bert.encoder.layer.0-3",), models.default_batch(seq=13)),
        (Mean().double(), mean_batch, ("gpt.blocks.0-3",), {k: v[:, :13] for k, v in mean_batch.items()}),
    ]
    for model, batch, layers, short in cases:
        plan = Plan(
            degrees=Degrees(cp=2), global_batch=8, seq_len=16, micro_batch=8, stages=(layers,), precision="fp64"
        )
        pm = build(model, prepare(trace(model, batch)), plan)
        for call in (pm.step, lambda b, pm=pm: pm(**b)):
            try:
                said.append(str(call(short)))
            except AutoparError as error:
                said.append(str(error))
    return said


@pytest.mark.distributed
def test_cp_03_padding_that_would_be_seen_is_refused() -> None:
    for said in run_ranks(2, _refusals):
        assert all("sequences of 13 tokens do not cut into the 4 parts" in text for text in said), said
        assert "attention that is not causal would see padding" in said[0]
        assert "a loss that does not ignore tokens by their target would see padding" in said[2]


@pytest.mark.distributed
@pytest.mark.parametrize("factory", [partial(family, "bert"), partial(padded, "bert")], ids=["whole", "padded"])
def test_cp_04_attention_that_is_not_causal(factory: Any) -> None:
    _check(factory, [_plan("bert"), _plan("bert", Degrees(cp=2), micro_batch=8)])


@pytest.mark.distributed
def test_cp_04_padding_of_causal_models_at_chunk_borders() -> None:
    _check(partial(padded, "llama"), [_plan("llama")])
    _check(partial(padded, "gpt2"), [_plan("gpt2")])


def test_cp_05_the_layout_that_runs_is_the_one_that_is_counted() -> None:
    """Front and back chunks where attention is causal, in order where it is not."""
    for name, zigzag in (("llama", True), ("encoder", False)):
        model, batch = family(name)
        assert uses_zigzag(prepare(trace(model, batch)).graph_module.graph) is zigzag
    assert query_key_pairs(32, 4, causal=True) == [132] * 4
    assert query_key_pairs(32, 4, causal=False) == [256] * 4


@pytest.mark.distributed
def test_cp_08_cross_attention_and_sliding_windows() -> None:
    _check(partial(family, "t5"), [_plan("t5")])
    _check(partial(family, "mistral"), [_plan("mistral"), _plan("mistral", context_parallel="all-gather")])
    _check(partial(family, "gemma3"), [_plan("gemma3")])


@pytest.mark.distributed
@pytest.mark.slow
def test_cp_08_windows_over_four_ranks() -> None:
    """A window of 8 over chunks of 2 reaches over several ranks."""
    _check(partial(family, "mistral"), [_plan("mistral", Degrees(cp=4)), _plan("mistral", Degrees(cp=2, dp=2))])
    _check(partial(family, "gemma2"), [_plan("gemma2", Degrees(cp=4))])


class Ignoring(models.TinyGPT):
    """z-loss beside the cross entropy: two means over tokens of different counts."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = super().forward(input_ids)
        if labels is None:
            return logits
        flat, target = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(flat, target) + 1e-2 * flat.logsumexp(-1).pow(2).mean()


def test_each_term_of_a_loss_is_a_mean_of_its_own() -> None:
    torch.manual_seed(0)
    model, batch = Ignoring().double(), models.default_batch()
    batch["labels"][4:, 3:] = -100
    wanted = model(**batch)
    plan = Plan(global_batch=8, seq_len=16, micro_batch=2, stages=(("blocks.0-3",),), precision="fp64")
    found = build(model, prepare(trace(model, batch)), plan).step(batch)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def all_ignored(smoothing: float) -> tuple[nn.Module, dict[str, Any]]:
    """The second half of the rows, a micro-batch of its own, has no target; nor has the second cp rank's part."""
    torch.manual_seed(0)
    batch = models.default_batch()
    labels = batch["labels"].clone()
    labels[4:] = -100
    labels[:, 5:] = -100
    return Smoothing(smoothing).double().train(), {**batch, "labels": labels}


class Smoothing(models.TinyGPT):
    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = super().forward(input_ids)
        if labels is None:
            return logits
        flat, target = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(flat, target, label_smoothing=self.smoothing)


@pytest.mark.distributed
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_micro_batches_and_ranks_without_targets(smoothing: float) -> None:
    wanted = [
        Plan(degrees=d, global_batch=8, seq_len=16, micro_batch=4 // d.dp, precision="fp64",
             stages=(("blocks.0-1",), ("blocks.2-3",)) if d.pp == 2 else (("blocks.0-3",),),
             parameters={"tokens.weight": "S(0)"} if d.tp == 2 else {})
        for d in (Degrees(cp=2), Degrees(tp=2), Degrees(dp=2), Degrees(pp=2))
    ]  # fmt: skip
    _check(partial(all_ignored, smoothing), wanted)


def test_router_losses_are_refused() -> None:
    """The load-balancing loss of experts is no mean over tokens."""
    model = models.mixtral_tiny()
    model.config.output_router_logits = True
    batch = {**models.default_batch(), "output_router_logits": True}
    plan = Plan(global_batch=8, seq_len=16, micro_batch=4, stages=(("model.layers.0-3",),), precision="fp32")
    with pytest.raises(AutoparError, match="not known to be a mean|mixes the rows of a batch"):
        build(model, prepare(trace(model, batch)), plan)
