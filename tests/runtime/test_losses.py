"""Vocabulary-parallel loss and embedding against torch's on one process (fp64), field case vp-01."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar.placement import parse_placement
from autopar.runtime.collectives import convert
from autopar.runtime.functional import rms_norm
from autopar.runtime.launch import run_ranks
from autopar.runtime.losses import cross_entropy_sum, vocab_parallel_cross_entropy_sum, vocab_parallel_embedding
from autopar.runtime.sharding import filled_up, local_slice


def _compare_loss(scale: float, smoothing: float, vocab: int) -> None:
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(3)
    whole = (torch.randn(4, 8, vocab, dtype=torch.float64, generator=generator) * scale).requires_grad_()
    target = torch.randint(0, vocab, (4, 8), generator=generator)
    target[0, :5] = -100
    reference = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="sum", label_smoothing=smoothing)
    (3.0 * reference).backward()
    placement = parse_placement("S(2)")
    local = local_slice(filled_up(whole.detach(), placement, n), placement, rank, n).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy_sum(local, target, label_smoothing=smoothing, group=group, vocab=vocab)
    (3.0 * loss).backward()
    plain = cross_entropy_sum(whole.detach(), target, label_smoothing=smoothing)
    assert whole.grad is not None
    bound = 1e-10 * max(1.0, abs(reference.item()))
    torch.testing.assert_close(loss, reference, rtol=0, atol=bound)
    torch.testing.assert_close(plain, reference, rtol=0, atol=0)
    wanted = local_slice(filled_up(whole.grad, placement, n), placement, rank, n)  # zero where it is filled up
    torch.testing.assert_close(local.grad, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab", [64, 65])
def test_vp_01_vocab_parallel_cross_entropy(scale: float, smoothing: float, vocab: int) -> None:
    run_ranks(4, _compare_loss, scale, smoothing, vocab, timeout_s=60)


def _bad_target() -> None:
    with pytest.raises(RuntimeError, match="outside the vocabulary"):
        vocab_parallel_cross_entropy_sum(torch.zeros(2, 4), torch.tensor([0, 8]), group=dist.group.WORLD.group_name)
    for bad in (8, -1):
        with pytest.raises(RuntimeError, match="outside the vocabulary"):
            vocab_parallel_embedding(
                torch.tensor([0, bad]), torch.zeros(4, 2), group=dist.group.WORLD.group_name, vocab=8
            )


def _nothing_counts(smoothing: float) -> None:
    local, target = torch.randn(3, 4, dtype=torch.float64).requires_grad_(), torch.full((3,), -100)
    loss = vocab_parallel_cross_entropy_sum(local, target, label_smoothing=smoothing, group=dist.group.WORLD.group_name)
    (loss / 0.0).backward()
    assert torch.equal(local.grad, torch.zeros(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_are_zero_where_no_token_counts(smoothing: float) -> None:
    """As torch's, by which one process trains on: its loss is NaN, its gradients are not."""
    run_ranks(2, _nothing_counts, smoothing, timeout_s=60)


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    run_ranks(2, _bad_target, timeout_s=60)


def _compare_embedding(padding_idx: int | None) -> None:
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(16, 6, dtype=torch.float64, generator=generator).requires_grad_()
    ids = torch.randint(0, 16, (3, 9), generator=generator)
    ids[0, 0] = 5
    gradient = torch.randn(3, 9, 6, dtype=torch.float64, generator=generator)
    reference = F.embedding(ids, weight, padding_idx=padding_idx)
    reference.backward(gradient)
    placement = parse_placement("S(0)")
    local = local_slice(weight.detach(), placement, rank, n).clone().requires_grad_()
    summand = vocab_parallel_embedding(ids, local, group=group, vocab=16, padding_idx=padding_idx)
    result = convert(summand, "P", "R", group=group)
    result.backward(gradient)
    assert weight.grad is not None
    assert torch.equal(result, reference)
    assert torch.equal(local.grad, local_slice(weight.grad, placement, rank, n))


@pytest.mark.parametrize("padding_idx", [None, 5])
def test_vocab_parallel_embedding(padding_idx: int | None) -> None:
    run_ranks(4, _compare_embedding, padding_idx, timeout_s=60)


def test_half_precision_losses_are_summed_in_fp32() -> None:
    logits, target = torch.zeros(4096, 8, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.long)
    loss = cross_entropy_sum(logits, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.item(), 4096 * torch.tensor(8.0).log().item(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_is_hugging_faces_to_the_bit(dtype: torch.dtype) -> None:
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x = torch.randn(2, 3, 32, dtype=dtype)
    for norm, offset in ((llama.LlamaRMSNorm(32, 1e-6), False), (gemma.GemmaRMSNorm(32, 1e-6), True)):
        norm.weight.data.normal_()
        norm = norm.to(dtype)
        assert torch.equal(rms_norm(x, norm.weight, 1e-6, torch.float32, offset), norm(x))
