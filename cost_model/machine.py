"""Seconds of kernels on one device in one precision, on one software stack.

Matrix multiplication of [m,k] x [k,n], `batch` times, in `rate` = peak x power derate x efficiency:

    max(2 (batch m n + wave_tail tile multiprocessors) (k + k_fill) / rate, bytes / bandwidth) + launch

The last wave of output tiles is on average partly empty (wave quantisation), and each tile pays a fill of its pipeline
over k, which is what makes narrow shards slow. Both are constants added to a product of sizes, so a price is affine in
every size and the bounds of the search hold. Sizes that are no multiple of 16 bytes run on slower kernels.

Attention: fused kernels at an own fraction of peak, falling at short sequences as s / (s + s_half), at small heads as
d / (d + d_half), backward at a fraction of that; "unfused" is two products and the passes over the score matrix.
Everything else moves the bytes of the eager graph, an op a kernel, or of fused chains (`cost_model.fusion`), times a
factor of the stack's elementwise class: chains it cannot fuse, dropout, statistics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autopar.cost_model.constant_table import Constants, GenerationConstants, load_constants
from autopar.cost_model.kernels import Array, Kernel, Kernels
from autopar.specs import DeviceSpec, StackSpec

__all__ = ["Machine"]

_ALIGNED_BYTES = 16
"""Tensor-core loads: a contiguous dim has to be a multiple of this to take the fast kernels (cuBLAS documentation)."""

_UNFUSED_FORWARD_BYTES, _UNFUSED_BACKWARD_BYTES = 11.0, 17.0
"""Per score in 16 bits: forward scores written (2), masked softmax (2 + 2), dropout with mask (2 + 2 + 1); backward
dropout (2 + 1 + 2), softmax (2 + 2 + 2), gradient of scores written and twice read (2 + 4)."""


_RATES = ("matmul_flops_per_s", "attention_flops_per_s", "bytes_per_s")
_GROWS_WITH = ("elementwise_traffic", "wave_elements", "k_fill", "unaligned_slowdown", "seq_half", "head_dim_half",
               "softmax_traffic")  # fmt: skip
"""Seconds are inverse to the rates, and grow with the others no more than in proportion."""


@dataclass(frozen=True)
class Machine:
    """Effective rates; see the module docstring. `fp8` is None, or the recipe whose rate the weight matrices run at."""

    matmul_flops_per_s: float
    attention_flops_per_s: float
    bytes_per_s: float
    launch_s: float
    elementwise_traffic: float
    element_bytes: int = 2
    fuses: bool = False
    attention: str = "flash"
    fp8_flops_per_s: float | None = None
    fp8_cast_bytes: float = 0.0
    wave_elements: float = 0.0
    k_fill: float = 0.0
    fp8_k_fill: float = 0.0
    unaligned_slowdown: float = 1.0
    attention_backward: float = 0.85
    seq_half: float = 0.0
    head_dim_half: float = 0.0
    softmax_traffic: float = 1.0

    @staticmethod
    def of(
        device: DeviceSpec, stack: StackSpec, dtype: str, *, fp8: str | None = None, constants: Constants | None = None
    ) -> Machine:
        """`dtype` is the name of the compute dtype, `fp8` one of the recipes of constants/stacks.toml.

        Raises SpecError if the device has no peak for the dtype.
        """
        table = (constants or load_constants()).of(device)
        peak = table.peak(device, dtype) * device.power_derate
        cuda = device.kind == "cuda"
        rate = None
        if fp8 is not None:
            name = "nvfp4" if fp8 == "nvfp4" else "fp8"
            rate = table.peak(device, name) * device.power_derate * table[f"matmul_{fp8}"]
        kernel = table.get(f"attention_{stack.attention}", 1.0) if cuda else 1.0
        return Machine(
            matmul_flops_per_s=peak * device.matmul_efficiency,
            attention_flops_per_s=peak * device.attention_efficiency * kernel,
            bytes_per_s=device.memory_bandwidth * device.memory_efficiency,
            launch_s=device.launch_s,
            elementwise_traffic=table[f"traffic_{stack.elementwise}"] if cuda else 1.0,
            element_bytes={"fp64": 8, "fp32": 4}.get(dtype, 2),
            fuses=cuda and stack.elementwise != "eager",
            attention=stack.attention if cuda else "flash",
            fp8_flops_per_s=rate,
            fp8_cast_bytes=table[f"cast_{fp8}"] if fp8 else 0.0,
            **(_gpu_terms(table) if cuda else {"attention_backward": 1.0}),
        )

    def in_16_bits(self) -> Machine:
        """The same machine where the fp8 recipe does not apply (embedding, head, loss)."""
        return replace(self, fp8_flops_per_s=None) if self.fp8_flops_per_s else self

    def least_pace(self, slower: Machine) -> float:
        """Every kernel takes at least this part of its seconds on `slower`; 0 if they differ in what they run."""
        alike = {name: getattr(slower, name) for name in ("launch_s", *_RATES, *_GROWS_WITH)}
        if replace(self, **alike) != slower:
            return 0.0
        launch = self.launch_s / slower.launch_s if slower.launch_s > 0 else 1.0
        grown = [getattr(self, name) / getattr(slower, name) for name in _GROWS_WITH if getattr(slower, name) > 0]
        rates = (getattr(slower, name) / getattr(self, name) for name in _RATES)
        least: float = min(launch, *rates) * math.prod(min(1.0, part) for part in grown)
        return least

    def kernel_s(self, kernel: Kernel) -> float:
        """Seconds of one kernel."""
        return _one(self, kernel)

    def seconds(self, kernels: Kernels) -> Array:
        """Seconds of each kernel."""
        moved_s = kernels.moved_bytes / self.bytes_per_s
        matmul_s = np.maximum(self._matmul_s(kernels), moved_s)
        attention_s = np.maximum(self._attention_s(kernels), moved_s)
        memory_s = self._memory_bytes(kernels) * self.elementwise_traffic / self.bytes_per_s
        times: Array = np.where(kernels.is_memory, memory_s, np.where(kernels.is_attention, attention_s, matmul_s))
        times += self._casts_s(kernels)
        total: Array = times + self.launches_s(kernels)
        return total

    def launches_s(self, kernels: Kernels) -> Array:
        """What each kernel's launches take of its seconds: none where another op of its chain carries it. The same for
        shards of any size."""
        launches = 1.0 if self.fuses else kernels.launches
        found: Array = np.where(kernels.is_memory & (self._memory_bytes(kernels) == 0), 0.0, self.launch_s * launches)
        return found

    def _memory_bytes(self, kernels: Kernels) -> Array:
        return kernels.fused_bytes if self.fuses else kernels.moved_bytes

    def _matmul_s(self, kernels: Kernels) -> Array:
        low = self.fp8_flops_per_s
        rate = np.where(kernels.is_matmul, low or 1.0, self.matmul_flops_per_s) if low else self.matmul_flops_per_s
        fill = np.where(kernels.is_matmul, self.fp8_k_fill, self.k_fill) if low else self.k_fill
        outputs = kernels.batch * kernels.m * kernels.n + self.wave_elements
        # a weight's gradient runs over tokens, which lie one under the other in both operands
        inner = np.where(kernels.backward == 2, kernels.m, kernels.k)
        seconds: Array = 2 * outputs * (kernels.k + fill) / rate * self._alignment(kernels.n, inner)
        return seconds

    def _alignment(self, *dims: Array) -> Array:
        slow = np.zeros(1, dtype=np.bool_)
        for dim in dims:
            slow = slow | (dim * self.element_bytes % _ALIGNED_BYTES != 0)
        return np.where(slow, self.unaligned_slowdown, 1.0)

    def _casts_s(self, kernels: Kernels) -> Array:
        """Quantising the operands of an fp8 product: reads in 16 bits, writes in 8, once plain and once transposed."""
        if self.fp8_flops_per_s is None:
            return np.zeros(1)
        elements = np.where(
            kernels.backward == 0, kernels.m * kernels.k, np.where(kernels.backward == 1, kernels.m * kernels.k, 0.0)
        )
        return np.where(kernels.is_matmul, elements * self.fp8_cast_bytes / self.bytes_per_s, 0.0)

    def _attention_s(self, kernels: Kernels) -> Array:
        m, n, d, batch = kernels.m, kernels.n, kernels.k, kernels.batch
        back = kernels.backward > 0
        if self.attention == "unfused":
            forward = self._product_s(m, n, d, batch) + self._product_s(m, d, n, batch)
            products = np.where(back, 2 * forward, forward)
            bytes_ = np.where(back, _UNFUSED_BACKWARD_BYTES, _UNFUSED_FORWARD_BYTES) * self.softmax_traffic
            unfused: Array = products + batch * m * n * bytes_ / self.bytes_per_s
            return unfused
        flops = np.where(back, 5.0, 2.0) * 2 * m * n * d * batch * kernels.share
        shape = (1 + self.seq_half / np.maximum(n, 1.0)) * (1 + self.head_dim_half / np.maximum(d, 1.0))
        slower = np.where(back, 1 / self.attention_backward, 1.0)
        seconds: Array = flops * shape * slower / self.attention_flops_per_s
        return seconds

    def _product_s(self, m: Array, n: Array, k: Array, batch: Array) -> Array:
        """A batched product; its operands are small, so it is often bound by their bytes."""
        flops_s = 2 * (batch * m * n + self.wave_elements) * (k + self.k_fill) / self.matmul_flops_per_s
        bytes_s = batch * (m * k + k * n + m * n) * self.element_bytes / self.bytes_per_s
        seconds: Array = np.maximum(flops_s * self._alignment(n, k), bytes_s)
        return seconds


def _gpu_terms(table: GenerationConstants) -> dict[str, float]:
    return {
        "wave_elements": table["wave_tail"] * table["multiprocessors"] * table["tile_elements"],
        "k_fill": table["k_fill"],
        "fp8_k_fill": table["fp8_k_fill"],
        "unaligned_slowdown": table["unaligned_slowdown"],
        "seq_half": table["attention_seq_half"],
        "head_dim_half": table["attention_head_dim_half"],
        "attention_backward": table["attention_backward"],
        "softmax_traffic": table["softmax_traffic"],
    }


@lru_cache(maxsize=200_000)
def _one(machine: Machine, kernel: Kernel) -> float:
    return float(machine.seconds(Kernels((kernel,)))[0])
