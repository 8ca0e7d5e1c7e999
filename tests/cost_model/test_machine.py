"""Kernel times against the formulas worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_model.kernels import ATTENTION, MATMUL, MEMORY, PRODUCT, Kernel, Kernels
from autopar.cost_model.machine import Machine

MACHINE = Machine(
    matmul_flops_per_s=100e12, attention_flops_per_s=50e12, bytes_per_s=1e12, launch_s=0.0, elementwise_traffic=1.0,
    wave_elements=1e6, k_fill=100.0, unaligned_slowdown=4.0, attention_backward=0.5, seq_half=1000.0,
)  # fmt: skip


def test_matmul_pays_a_wave_and_a_fill() -> None:
    kernel = Kernel(MATMUL, m=1000, n=8000, k=4096)
    expected = 2 * (1000 * 8000 + 1e6) * (4096 + 100) / 100e12
    assert MACHINE.kernel_s(kernel) == pytest.approx(expected)


def test_a_narrow_shard_is_less_efficient() -> None:
    whole, shard = (MACHINE.kernel_s(Kernel(MATMUL, m=2048, n=4096, k=k)) for k in (4096, 512))
    assert whole / 8 < shard < whole / 6


def test_memory_bound_matmul() -> None:
    kernel = Kernel(MATMUL, m=8, n=8, k=8, moved_bytes=1e9)
    assert MACHINE.kernel_s(kernel) == pytest.approx(1e-3)


@pytest.mark.parametrize(("k", "slow"), [(128, 1.0), (104, 1.0), (108, 4.0)])
def test_unaligned_dims_are_slow(k: int, slow: float) -> None:
    """216 bytes are no multiple of 16: seen at head_dim 108, where a step took 1.3 times as long as at 104 or 112."""
    plain = 2 * (1024 * 1024 + 1e6) * (k + 100) / 100e12
    assert MACHINE.kernel_s(Kernel(PRODUCT, m=1024, n=1024, k=k)) == pytest.approx(plain * slow)


def test_flash_attention_counts_half_when_causal_and_five_matmuls_back() -> None:
    sizes = {"m": 2000, "n": 2000, "k": 128, "batch": 16}
    forward = MACHINE.kernel_s(Kernel(ATTENTION, **sizes, share=0.5))
    backward = MACHINE.kernel_s(Kernel(ATTENTION, **sizes, share=0.5, backward=1))
    assert forward == pytest.approx(2 * 2 * 2000 * 2000 * 128 * 16 * 0.5 * 1.5 / 50e12)
    assert backward == pytest.approx(forward * 2.5 / 0.5)


def test_unfused_attention_walks_the_scores() -> None:
    kernel = Kernel(ATTENTION, m=2048, n=2048, k=128, batch=32, share=0.5)
    passes = 2048 * 2048 * 32 * 11 / 1e12
    assert replace(MACHINE, attention="unfused").kernel_s(kernel) > MACHINE.kernel_s(kernel)
    assert replace(MACHINE, attention="unfused").kernel_s(kernel) > passes


def test_fp8_applies_to_weights_only_and_pays_its_casts() -> None:
    low = replace(MACHINE, fp8_flops_per_s=200e12, fp8_k_fill=100.0, fp8_cast_bytes=6.0)
    weight, product = Kernel(MATMUL, m=4096, n=4096, k=4096), Kernel(PRODUCT, m=4096, n=4096, k=4096)
    casts = 4096 * 4096 * 6.0 / 1e12
    assert low.kernel_s(weight) == pytest.approx(MACHINE.kernel_s(weight) / 2 + casts)
    assert low.kernel_s(product) == MACHINE.kernel_s(product)
    assert low.in_16_bits().kernel_s(weight) == MACHINE.kernel_s(weight)


def test_fused_chains_move_less_and_launch_once() -> None:
    chain = Kernels(
        [Kernel(MEMORY, moved_bytes=4e9, fused_bytes=0.0), Kernel(MEMORY, moved_bytes=4e9, fused_bytes=5e9)]
    )
    eager = replace(MACHINE, launch_s=1e-3).seconds(chain)
    fused = replace(MACHINE, launch_s=1e-3, fuses=True).seconds(chain)
    np.testing.assert_allclose(eager, [5e-3, 5e-3])
    np.testing.assert_allclose(fused, [0.0, 6e-3])


def test_price_per_sequence_never_rises_with_the_micro_batch() -> None:
    """What the bounds of the search stand on."""
    times = [MACHINE.kernel_s(Kernel(MATMUL, m=2048 * b, n=4096, k=1024)) / b for b in (1, 2, 3, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_a_number_of_tokens_is_never_unaligned() -> None:
    """Forward and both gradients of tokens x 64 times 64 x 96; a width of 100 bytes slows all three."""
    machine = replace(MACHINE, unaligned_slowdown=8.0, wave_elements=0.0, k_fill=0.0)

    def seconds(tokens: float, out: float) -> list[float]:
        sizes = [(tokens, out, 64.0, 0), (tokens, 64.0, out, 1), (out, 64.0, tokens, 2)]
        return [machine.kernel_s(Kernel(MATMUL, m, n, k, backward=back)) / tokens for m, n, k, back in sizes]

    assert seconds(13, 96) == pytest.approx(seconds(16, 96))
    assert seconds(16, 50) == pytest.approx([8 * 50 / 96 * s for s in seconds(16, 96)])


def test_launches_are_part_of_the_seconds_and_those_of_a_chain_are_its_carriers() -> None:
    machine = replace(MACHINE, launch_s=1e-3)
    kernels = Kernels([Kernel(MATMUL, 8, 8, 8), Kernel(MEMORY, moved_bytes=8, fused_bytes=0.0, launches=6),
                       Kernel(MEMORY, moved_bytes=8, fused_bytes=16.0, launches=2)])  # fmt: skip
    assert list(machine.launches_s(kernels)) == pytest.approx([1e-3, 6e-3, 2e-3])
    assert list(replace(machine, fuses=True).launches_s(kernels)) == pytest.approx([1e-3, 0.0, 1e-3])
    for each in (machine, replace(machine, fuses=True)):
        free = replace(each, launch_s=0.0).seconds(kernels)
        assert list(each.seconds(kernels)) == pytest.approx(list(free + each.launches_s(kernels)))
