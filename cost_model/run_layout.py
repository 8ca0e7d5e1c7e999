"""What the price of a run depends on beside the machine: its layout, its software stack, the work of its units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost_model.block_layout import BlockWork, LayoutPrice
from autopar.mesh import Degrees

__all__ = ["MODES", "RunLayout", "StackTraits", "Unit"]

MODES = ("none", "selective", "op", "selective-ops", "full")
"""What a layer keeps: everything; all but the attention core; attention and every second product (torchtitan);
attention and every product; its input."""


@dataclass(frozen=True, kw_only=True)
class StackTraits:
    """Declared properties of a software stack, see constants/stacks.toml.

    keeps_gathered          ZeRO 2 gathers parameters once a step, not each micro-batch
    sums_replicas_once      hybrid shards are summed over their copies once a step, not each micro-batch
    scatters_stage_outputs  a replicated stream is cut over tp for the way between stages and gathered behind it
    bucket_bytes            gradients summed at a time without ZeRO
    stops_early             recomputation ends when it has all that backward reads (torch's checkpoint)
    """

    attention: str = "flash"
    elementwise: str = "eager"
    gradient_bytes: float = 2
    reduce_bytes: float = 2
    gather_bytes: float = 2
    fp8_gather_bytes: float = 2
    overlap: tuple[str, ...] = ("dp",)
    zero1_gather: str = "all_gather"
    fp8: str = "fp8"
    recompute: str = "none"
    fully_sharded: bool = False
    fused_gradients: bool = False
    fused_kernels: bool = False
    gathers_again: bool = False
    loss: str = "eager"
    expandable_segments: bool = False
    keeps_stage_outputs: bool = False
    spare_gradient_bytes: float = 0
    keeps_gathered: bool = False
    sums_replicas_once: bool = False
    scatters_stage_outputs: bool = True
    bucket_bytes: float = math.inf
    stops_early: bool = False


@dataclass(frozen=True, kw_only=True)
class RunLayout:
    """A run as given. `zero_shard` is the number of ranks a ZeRO shard group has (dp x cp unless it is a hybrid);
    `micro_batch` in sequences; `layers` of the whole model; `recompute` is one of MODES."""

    degrees: Degrees
    layers: int
    seq_len: int
    micro_batch: int
    micro_batches: int
    virtual_stages: int = 1
    zero: int = 0
    zero_shard: int = 1
    recompute: str = "none"
    sequence_sharding: bool = False
    cp_exchange: str = "ring"
    fp8: str | None = None
    schedule: str = "1f1b"


@dataclass(frozen=True, eq=False)
class Unit:
    """A layer, or an end of the model: what one rank does for a micro-batch, what that takes, the parameters it holds
    and how many of them are frozen; keys and values, and queries, of one rank in bytes. `sizes`: local elements of each
    trained parameter, by name."""

    work: BlockWork
    price: LayoutPrice
    parameters: float
    key_value_bytes: float = 0.0
    query_bytes: float = 0.0
    frozen: float = 0.0
    sizes: Mapping[str, float] = field(default_factory=dict, repr=False)

    @property
    def trained(self) -> float:
        return self.parameters - self.frozen
