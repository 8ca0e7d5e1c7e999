"""Bytes a rank holds: the formulas that the search and the pricing of given runs share.

Precision recipes of parameters, gradients and optimizer, what ZeRO leaves of them, what a layer keeps in each mode of
recomputation, and the peak at the loss. When they are there at once is said by `moments`.

bytes per parameter      parameter  gradient  master  each Adam moment
  fp32, fp64             4, 8       as it     -       as it
  bf16, fp16 (pure)      2          2         -       2 (torch keeps moments in the parameter's dtype)
  bf16-mixed             2          2 or 4    4       4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.errors import SpecError, nearest

__all__ = [
    "CATEGORIES",
    "COMPUTE_DTYPES",
    "LayerBytes",
    "Recipe",
    "frozen_bytes",
    "gathered_bytes",
    "loss_bytes",
    "mixed_recipe",
    "recipe",
    "state_bytes",
]

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "reserved")

COMPUTE_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16-mixed": torch.bfloat16,
}
_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "adagrad": 1, "rmsprop": 1}


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter by category; `optimizer_bytes` holds moments and, of `master_bytes`, the master copy."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    master_bytes: float = 0

    @property
    def total_bytes(self) -> float:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def update_traffic_bytes(self) -> float:
        """Memory traffic of one optimizer update: gradient and state read, parameter and state written, the gradient
        read once more for its norm; without a master copy the parameter is read too."""
        parameter = self.parameter_bytes * (1 if self.master_bytes else 2)
        return parameter + 2 * self.optimizer_bytes + 2 * self.gradient_bytes


def recipe(precision: str, optimizer: str, gradient_dtype: str = "same") -> Recipe:
    """The recipe of a training run. Raises SpecError for an optimizer whose state is not known."""
    if optimizer.lower() not in _MOMENTS:
        raise SpecError(
            f"unknown optimizer {optimizer!r}", where="train: optimizer", try_=nearest(optimizer, list(_MOMENTS))
        )
    moments = _MOMENTS[optimizer.lower()]
    size = COMPUTE_DTYPES[precision].itemsize
    gradient = 4 if gradient_dtype == "fp32" else size
    if precision == "bf16-mixed":
        return Recipe(size, gradient, 4 + 4 * moments, master_bytes=4)
    return Recipe(size, gradient, size * moments)


def mixed_recipe(gradient_bytes: float) -> Recipe:
    """Mixed-precision Adam: 16-bit parameters, fp32 master copy and moments."""
    return Recipe(2, gradient_bytes, 12, master_bytes=4)


def state_bytes(
    recipe: Recipe, zero: int, shard: int, *, fully_sharded: bool = False, single: bool = False
) -> dict[str, float]:
    """Bytes a parameter of "parameters", "gradients" and "optimizer" on one of `shard` ranks that share a copy.

    fully_sharded: the stack shards by FSDP: masters are shards, and below level 3 a whole 16-bit copy is kept for the
    step; at level 1 the gradients too are whole until the last micro-batch, and the shards come as they go
    (docs/zero.md). single: the step has one micro-batch: at levels 1 and 2 whole parameters are given up as shards of
    gradients come, which are never larger, so that both are never there at once.
    """
    shard = max(1, shard)
    if zero == 3 or (zero and fully_sharded):
        wide = recipe.master_bytes or recipe.parameter_bytes
        moments = recipe.optimizer_bytes - recipe.master_bytes
        gradients = wide / (1 if zero == 1 else shard)
        return {
            "parameters": wide / shard + (recipe.parameter_bytes if zero < 3 else 0),
            "gradients": 0.0 if single and zero < 3 else gradients,
            "optimizer": moments / shard,
        }
    return {
        "parameters": recipe.parameter_bytes,
        "gradients": recipe.gradient_bytes / (shard if zero == 2 else 1),
        "optimizer": recipe.optimizer_bytes / (shard if zero else 1),
    }


def frozen_bytes(recipe: Recipe, zero: int, shard: int) -> float:
    """Bytes of a frozen parameter on one of `shard` ranks: no gradient and no moments. Below ZeRO 3 it stays whole, its
    master with it (docs/zero.md)."""
    if zero == 3:
        return (recipe.master_bytes or recipe.parameter_bytes) / max(1, shard)
    return recipe.parameter_bytes + recipe.master_bytes


@dataclass(frozen=True)
class LayerBytes:
    """What a layer and micro-batch make: everything kept for the backward, the largest working set of the backward,
    the layer's input, the output of its attention core, the outputs that each op-level mode keeps."""

    saved: float
    working: float
    border: float
    core: float = 0.0
    op_outputs: float = 0.0
    product_outputs: float = 0.0

    def kept(self, mode: str) -> tuple[float, float]:
        """(kept for the backward, working set of the backward) when the layer is recomputed by `mode`."""
        if mode == "none":
            return self.saved, self.working
        if mode == "selective":
            return self.saved - self.core, self.core + self.working
        if mode == "full":
            return self.border, self.saved + self.working
        outputs = self.op_outputs if mode == "op" else self.product_outputs
        return outputs + self.border, max(0.0, self.saved - outputs) + self.working


def loss_bytes(logits: float, head_input: float, loss: str, tp: int, element_bytes: float = 2) -> float:
    """Peak at the loss, of `logits` elements on a rank. A fused vocabulary-parallel loss ("in_place") works in its one
    fp32 copy of the logits and keeps the head's input and its gradient; torch ("eager") holds logits, their fp32 copy,
    log-probabilities and the gradient, and its vocabulary-parallel loss two copies more; ours ("own") none more."""
    if loss == "in_place":
        return 4 * logits + 4 * head_input
    wide = max(4.0, element_bytes)
    copies = 2 + (element_bytes < wide) + (2 if tp > 1 and loss == "eager" else 0)
    return (element_bytes + copies * wide) * logits


def gathered_bytes(layer_parameters: float, end_parameters: float, gather_bytes: float) -> float:
    """ZeRO 3: two layers and the ends gathered; gradients of the ends whole, as wide, until they are reduced."""
    return 2 * gather_bytes * (layer_parameters + end_parameters)
