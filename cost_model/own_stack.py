"""What autopar's own runtime does, in the terms that stacks are declared in (constants/stacks.toml)."""

from __future__ import annotations

from autopar.cost_model.memory import Recipe
from autopar.cost_model.step_price import StackTraits
from autopar.specs import StackSpec

__all__ = ["own_traits"]

_OVERLAPS = {"dp_reduce": "dp"}
"""Names of StackSpec.overlap -> of StackTraits.overlap: those that every plan runs with."""


def own_traits(stack: StackSpec, recipe: Recipe, zero: int) -> StackTraits:
    """ZeRO is FSDP2: parameters are shards of the masters, reduced in their dtype (docs/zero.md)."""
    wide = recipe.master_bytes or recipe.parameter_bytes
    return StackTraits(
        attention=stack.attention,
        elementwise=stack.elementwise,
        gradient_bytes=recipe.gradient_bytes,
        reduce_bytes=wide if zero else recipe.gradient_bytes,
        gather_bytes=recipe.parameter_bytes,
        overlap=tuple(_OVERLAPS[name] for name in stack.overlap if name in _OVERLAPS),
        fully_sharded=True,
        loss="own",
        keeps_gathered=True,
        sums_replicas_once=True,
        scatters_stage_outputs=False,
    )
