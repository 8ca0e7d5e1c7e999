"""Peak bytes of a rank of a training run whose layout is given, by category and stage.

    parameters + gradients + optimizer                 what the precision recipe and ZeRO leave on a rank
    + in flight x (kept a layer x layers + ends)       activations, by schedule and mode of recomputation
    + the largest working set of the step              at the loss, or in the backward of a layer
    + gathered units (FSDP), collective buffers
    = allocated;  x fragmentation = reserved;  + context = what nvidia-smi shows

Kept bytes are read off the graph at local shapes (`cost_model.activations`), under the kernels the stack declares.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model import memory, moments
from autopar.cost_model.constant_table import GenerationConstants
from autopar.cost_model.run_price import RunLayout, RunWork, StackTraits, stage_layers

__all__ = ["RunMemory", "run_memory"]

BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class RunMemory:
    """Bytes of the fullest stage: by category, and the peak as the three usual instruments show it."""

    stage: int
    parts: dict[str, float]
    allocated: float
    reserved: float
    device: float


def run_memory(work: RunWork, layout: RunLayout, traits: StackTraits, constants: GenerationConstants) -> RunMemory:
    """Peak of the fullest stage."""
    counts = stage_layers(layout.layers, layout.degrees.pp, layout.virtual_stages)
    stages = [_stage(work, layout, traits, s, n) for s, n in enumerate(counts)]
    totals = [sum(parts.values()) for parts in stages]
    fullest = max(range(len(totals)), key=totals.__getitem__)
    allocated = totals[fullest]
    reserved = allocated * (1 if traits.expandable_segments else 1 + constants["fragmentation"])
    return RunMemory(fullest, stages[fullest], allocated, reserved, reserved + constants["context_bytes"])


def in_flight(layout: RunLayout, stage: int) -> float:
    """See `moments.in_flight`."""
    d = layout.degrees
    return moments.in_flight(layout.schedule, stage, d.pp, layout.micro_batches, layout.virtual_stages)


def _stage(work: RunWork, layout: RunLayout, traits: StackTraits, stage: int, count: int) -> dict[str, float]:
    first, last = stage == 0, stage == layout.degrees.pp - 1
    held = count * work.layer_parameters
    held += (work.prologue_parameters if first else 0.0) + (work.epilogue_parameters if last else 0.0)
    kept, working = _kept(work, layout, traits)
    outputs = work.border_bytes if traits.keeps_stage_outputs and layout.degrees.pp > 1 else 0.0
    flight = in_flight(layout, stage)
    tp = layout.degrees.tp
    at_loss = memory.loss_bytes(work.logits, work.head_input, traits.loss, tp) if last else 0.0
    in_layer = working + 4 * work.stream  # a whole input and a whole gradient of the stream
    return {
        **_states(held, layout, traits),
        "activations": flight * (count * kept + outputs + (work.prologue.saved_bytes if first else 0.0)),
        "working": max(at_loss, in_layer) + _gradient_scratch(work, traits, last),
        **_communication(work, layout, traits),
    }


def _states(held: float, layout: RunLayout, traits: StackTraits) -> dict[str, float]:
    """Mixed precision: 16-bit parameters, gradients as the stack accumulates them, fp32 master copy and two moments."""
    recipe = memory.mixed_recipe(traits.gradient_bytes + traits.spare_gradient_bytes)
    each = memory.state_bytes(recipe, layout.zero, layout.zero_shard, fully_sharded=traits.fully_sharded)
    return {name: nbytes * held for name, nbytes in each.items()}


def _kept(work: RunWork, layout: RunLayout, traits: StackTraits) -> tuple[float, float]:
    """(kept for the backward, working set of the backward) of a layer and micro-batch."""
    saved, working, core = work.layer.saved_bytes, work.layer.working_bytes, work.attention_core_bytes
    if traits.attention == "unfused":  # softmax, dropout mask and dropped probabilities; two more while they are made
        core = _SCORE_BYTES * work.scores
        saved, working = saved + core, max(working, 4 * work.scores)
    layer = memory.LayerBytes(saved, working, work.border_bytes, core, work.op_kept_bytes, work.product_bytes)
    return layer.kept(layout.recompute)


_SCORE_BYTES = 5.0


def _gradient_scratch(work: RunWork, traits: StackTraits, last: bool) -> float:
    """Transformer Engine hands autograd a dummy gradient of each weight where it adds to the fp32 one."""
    if not traits.fused_gradients:
        return 0.0
    return 2.0 * (sum(work.weight_shapes) + (work.head_weight if last else 0.0))


def _communication(work: RunWork, layout: RunLayout, traits: StackTraits) -> dict[str, float]:
    if traits.fully_sharded and layout.zero >= 2:
        ends = work.epilogue_parameters + work.prologue_parameters
        gathered = memory.gathered_bytes(work.layer_parameters, ends, traits.gather_bytes)
        return {"gathered": gathered if layout.zero == 3 else 0.0}
    return {"buffers": 2.0 * BUCKET_BYTES if layout.degrees.dp > 1 else 0.0}
