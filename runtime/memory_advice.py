"""What to change when a rank's memory comes near the device's limit."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.plan import Plan

__all__ = ["memory_advice"]

NEAR, FRAGMENTED, OFF = 0.9, 0.1, 1.1


def memory_advice(plan: Plan, peak: Sequence[int], reserved: int, limit: int | None) -> list[str]:
    """Sentences, most promising first; none while every rank is well below `limit`.

    peak      bytes of tensors by rank at their peak
    reserved  bytes the allocator of this rank holds at its peak
    limit     bytes of the device; None if it is not known
    """
    highest = max(peak, default=0)
    held = max(highest, reserved)
    if not limit or held < NEAR * limit:
        return []
    rank = list(peak).index(highest)
    lines = [f"rank {rank} holds {held / 2**30:.2f} of {limit / 2**30:.2f} GiB ({held / limit:.0%})"]
    if reserved - highest > FRAGMENTED * reserved:
        lines.append(
            f"{(reserved - highest) / 2**30:.2f} GiB of it is fragmentation: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    if plan.micro_batch > 1:
        lines.append(f"micro_batch {plan.micro_batch // 2} instead of {plan.micro_batch} halves the activations")
    layers = [path for stage in plan.layer_paths() for path in stage]
    kept = [path for path in layers if plan.checkpoint_mode(path) != "full"]
    if kept:
        lines.append(f"{len(kept)} of {len(layers)} layers are not checkpointed in full: checkpoint=full")
    if plan.zero < 3 and plan.degrees.dp * plan.degrees.cp > 1:
        lines.append(f"zero {plan.zero + 1} instead of {plan.zero} divides more over the data ranks")
    return lines
