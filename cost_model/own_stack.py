"""What autopar's own runtime does, in the terms that stacks are declared in (constants/stacks.toml)."""

from __future__ import annotations

from autopar.cost_model.memory import Recipe
from autopar.cost_model.run_layout import StackTraits
from autopar.plan import BUCKET_BYTES
from autopar.specs import StackSpec

__all__ = ["own_traits"]


def own_traits(stack: StackSpec, recipe: Recipe, zero: int, *, sequence_sharding: bool, schedule: str) -> StackTraits:
    """ZeRO is FSDP2: parameters are shards of the masters, reduced in their dtype (docs/zero.md). What the stack
    declares to overlap is priced where a plan runs with it: rings over tp need sequence sharding, sends 1F1B."""
    applies = {"dp_reduce": True, "tp_linear": True, "tp_ring": sequence_sharding, "pp_send": schedule == "1f1b"}
    names = {"dp_reduce": "dp", "tp_linear": "tp_linear", "tp_ring": "tp", "pp_send": "pp"}
    wide = recipe.master_bytes or recipe.parameter_bytes
    return StackTraits(
        attention=stack.attention,
        elementwise=stack.elementwise,
        gradient_bytes=recipe.gradient_bytes,
        reduce_bytes=wide if zero else recipe.gradient_bytes,
        gather_bytes=recipe.parameter_bytes,
        overlap=tuple(names[name] for name in stack.overlap if applies.get(name)),
        fully_sharded=True,
        loss="own",
        keeps_gathered=True,
        sums_replicas_once=True,
        scatters_stage_outputs=False,
        stops_early=True,
        bucket_bytes=BUCKET_BYTES,
    )
