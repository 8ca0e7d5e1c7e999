"""Bytes that a stage of one setting holds: what is always there, and the moments at which it may hold most.

    at an end    the loss (or the first op of the prologue), while all layers hold what they keep
    in a layer   the backward of a layer, behind that of the epilogue
    late         the backward of the prologue, when the layers have given up one micro-batch's

each of them while no, some or all chunks have gradients (`moments`). What FSDP gathers and reduces in differs by place
too: docs/zero.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_model import memory
from autopar.cost_model.block_prices import BlockPrices, LayerPrice
from autopar.cost_model.candidates import Setting
from autopar.cost_model.memory import Recipe
from autopar.cost_model.moments import Flight, flights
from autopar.cost_model.pipeline_problem import Moment
from autopar.cost_model.run_layout import Unit
from autopar.cost_model.stage_table import Floats
from autopar.plan import BUCKET_BYTES

__all__ = ["StageMemory"]


@dataclass(frozen=True)
class _Buffers:
    """What FSDP holds beside shards and, below level 3, whole parameters, by place; "first": before any gradient;
    `waiting`: whole gradients of the head."""

    first_end: float = 0.0
    first_layer: float = 0.0
    end: float = 0.0
    layer: float = 0.0
    late: float = 0.0
    waiting: float = 0.0


class StageMemory:
    """`ends` are (stage, unit) of prologue and epilogue, `repeats` the layers of each class in the model."""

    def __init__(
        self, setting: Setting, blocks: BlockPrices, classes: Sequence[LayerPrice], ends: Sequence[tuple[int, Unit]],
        recipe: Recipe, repeats: Sequence[int],
    ) -> None:  # fmt: skip
        self.setting, self.blocks, self.classes, self.ends, self.recipe = setting, blocks, classes, ends, recipe
        self.pp, self.m, self.v = setting.degrees.pp, setting.micro_batches, setting.virtual_stages
        zero, shard, wide = setting.zero, setting.zero_shard, recipe.master_bytes or recipe.parameter_bytes
        self.state = memory.state_bytes(recipe, zero, shard, fully_sharded=True, single=self.m == 1)
        self._given_up = recipe.parameter_bytes if zero in (1, 2) and self.m == 1 else 0.0
        self._arriving = wide / shard if self._given_up else self.state["gradients"]
        self._frozen_bytes = memory.frozen_bytes(recipe, zero, shard)
        self._repeats = repeats
        self._tied = blocks.tied_parameters - blocks.tied_frozen if self.pp == 1 else 0.0

    # --- parameters, gradients, optimizer -----------------------------------------------------------------------------

    def end_units(self, stage: int) -> Iterator[Unit]:
        return (unit for here, unit in self.ends if here == stage)

    def state_of(self, unit: Unit) -> dict[str, float]:
        """Of one layer or end; of "gradients" what is there from the step's begin."""
        return {
            "parameters": unit.trained * self.state["parameters"] + unit.frozen * self._frozen_bytes,
            "gradients": self._standing(unit),
            "optimizer": unit.trained * self.state["optimizer"],
        }

    def _standing(self, unit: Unit) -> float:
        """Gradients in buckets that keep their memory between steps: those that share one. A tensor of more than half a
        bucket is taken to have one to itself, which comes with its gradient. Under zero-bubble none keeps it."""
        d = self.setting.degrees
        if self.setting.zero or d.dp * d.cp == 1 or self.setting.schedule == "zero-bubble":
            return 0.0
        each = self.state["gradients"]
        return sum(n * each for n in unit.sizes.values() if n * each <= BUCKET_BYTES / 2)

    def gradient_bytes(self, unit: Unit) -> float:
        """Gradients that come in a step's first backward, less whole parameters that it gives up."""
        return sum(self.changes(unit).values())

    def changes(self, unit: Unit) -> dict[str, float]:
        """`gradient_bytes` by category."""
        gradients = unit.trained * self._arriving - self._standing(unit)
        return {"gradients": gradients, "parameters": -unit.trained * self._given_up}

    def layer_static_bytes(self, index: int) -> float:
        return sum(self.state_of(self.classes[index].unit).values())

    def static_bytes(self, stage: int) -> float:
        """Of a stage's ends."""
        return sum(sum(self.state_of(unit).values()) for unit in self.end_units(stage))

    # --- activations --------------------------------------------------------------------------------------------------

    def layer_bytes(self, index: int, mode: str) -> tuple[float, float]:
        """(kept per micro-batch, working set): what the layer's backward holds beside, and a gradient of the stream."""
        made, work = self.classes[index].bytes, self.classes[index].unit.work
        kept, _ = made.kept(mode)
        there = kept if mode in ("none", "selective") else work.entering_bytes
        there += made.product_outputs if mode == "selective-ops" else 0.0
        return kept, max(0.0, self._in_backward(self.classes[index].unit) - there) + self.blocks.border_bytes

    def whole_bytes(self, index: int) -> float:
        """Of one more layer in a recomputed segment: what it keeps, and later its gradients, if they stay."""
        layer = self.classes[index]
        made = layer.unit.trained * self.recipe.parameter_bytes if self.reduces_at_once else 0.0
        return max(layer.bytes.saved, made)

    def _in_backward(self, unit: Unit) -> float:
        """Most that a unit holds of its own. Where it is reduced by itself all of its gradients stay."""
        return unit.work.in_backward_bytes[self.reduces_at_once]

    @property
    def reduces_at_once(self) -> bool:
        """Whether gradients are reduced in every micro-batch."""
        return self.setting.zero > 1 or (self.setting.zero == 1 and self.m == 1)

    @property
    def glue_bytes(self) -> float:
        """Kept for a micro-batch in flight by the prologue."""
        return self.blocks.prologue.work.saved_bytes

    def _loss_bytes(self) -> float:
        """Peak at the loss, what the epilogue keeps included, of which the log-probabilities are among the copies."""
        tp, width = self.setting.degrees.tp, self.recipe.parameter_bytes
        own = self.blocks.epilogue
        at_loss = memory.loss_bytes(self.blocks.logits, 0.0, "own", tp, width)
        at_loss += max(0.0, own.work.saved_bytes - max(4, width) * self.blocks.logits)
        return max(at_loss, own.work.saved_bytes + own.work.working_bytes, self._in_backward(own))

    def _put_off_bytes(self, stage: int) -> float:
        """Zero-bubble: gradients of products' outputs, which the put-off half of a backward reads, of the micro-batch
        at hand and of as many before as the stage's index (the first stage puts off whole backwards). Layers are
        counted as if spread evenly: which stage has how many is not known yet."""
        if self.setting.schedule != "zero-bubble" or stage == 0:
            return 0.0
        outputs = [n * layer.bytes.product_outputs for n, layer in zip(self._repeats, self.classes, strict=True)]
        made = sum(outputs) / self.pp
        made += self.blocks.logits * self.recipe.parameter_bytes if stage == self.pp - 1 else 0.0
        return (min(self.m, stage) + 1) * made

    # --- moments ------------------------------------------------------------------------------------------------------

    def moments(self, stage: int, segment: int = 1, most: int | None = None) -> tuple[Moment, ...]:
        """Those at which a stage may hold most; see the head of this module. So many layers are recomputed together.
        With about `most` numbers of chunks that have gradients only: what they hold is a lower bound."""
        found: list[Moment] = []
        buffers = self._buffers(stage, segment)
        for flight in flights(self.setting.schedule, stage, self.pp, self.m, self.v, most):
            if flight.in_flight and (stage == 0 or stage == self.pp - 1):
                found.append(self._at_end(stage, flight, buffers))
            found.append(self._in_layer(stage, flight, buffers))
            if stage == 0 and flight.gradients == 1:
                found.append(self._late(flight, buffers))
        return tuple(found)

    def _at_end(self, stage: int, flight: Flight, buffers: _Buffers) -> Moment:
        first = flight.gradients == 0
        loss = self._loss_bytes() if stage == self.pp - 1 else 0.0
        entering = self.blocks.prologue.work.working_bytes if stage == 0 else 0.0
        beside = self._beside(stage, flight.in_flight, buffers.first_end if first else buffers.end)
        beside["logits"] += loss
        beside["activations"] = max(0.0, entering - loss)
        if not first:
            beside |= self._end_changes(stage, flight)
        return Moment(flight.in_flight, flight.gradients, beside, False, flight.excess)

    def _in_layer(self, stage: int, flight: Flight, buffers: _Buffers) -> Moment:
        """With nothing else in flight this is the end of a lone backward through the layers."""
        alone = flight.gradients == 0 or not flight.in_flight
        beside = self._beside(stage, flight.in_flight, buffers.first_layer if alone else buffers.layer)
        waiting = buffers.waiting + self._tied * self.recipe.parameter_bytes
        beside["activations"] = self._put_off_bytes(stage) + waiting
        beside |= self._end_changes(stage, flight)
        return Moment(flight.in_flight, flight.gradients, beside, True, flight.excess)

    def _late(self, flight: Flight, buffers: _Buffers) -> Moment:
        """Working set of the prologue's backward (an embedding's gradient), when the layers have given up theirs."""
        own, left = self.blocks.prologue, max(0.0, flight.in_flight - 1 / self.v)
        beside = self._beside(0, left, buffers.late)
        made = max(0.0, self._in_backward(own) - own.work.saved_bytes) if flight.in_flight else 0.0
        beside["activations"] = made + self._tied * self.recipe.parameter_bytes
        beside |= self._end_changes(0, flight, late=True)
        return Moment(left, 1, beside, False, flight.excess)

    def _beside(self, stage: int, flight: float, buffers: float) -> dict[str, float]:
        """In any place: buffers, outputs that are held for their backward and a gradient that arrives; logits of other
        micro-batches that are in flight."""
        held = self._at_loss(flight) if stage == self.pp - 1 else 0.0
        logits = max(0.0, held - 1) * self.blocks.epilogue.work.saved_bytes
        return {"communication": buffers + self._output_bytes(stage, flight), "logits": logits}

    def _output_bytes(self, stage: int, flight: float) -> float:
        if self.pp == 1:
            return 0.0
        outputs = flight * self.v
        outputs += 1 if stage < self.pp - 1 else -self._at_loss(flight)
        return max(0.0, outputs) * self.blocks.border_bytes

    def _at_loss(self, flight: float) -> float:
        """Micro-batches in flight through the last chunk of the last stage: most schedules turn back there."""
        return flight if self.setting.schedule in ("gpipe", "zero-bubble") else min(1.0, flight * self.v)

    def _end_changes(self, stage: int, flight: Flight, *, late: bool = False) -> dict[str, float]:
        """`changes` of the epilogue, which come first, and of the prologue, which come last."""
        (first, prologue), (last, epilogue) = self.ends
        done = late or (flight.gradients == 1 and flight.in_flight > 0)
        come = [epilogue] * (stage == last) + [prologue] * (stage == first and done)
        found = {"parameters": 0.0, "gradients": 0.0}
        for unit in come:
            for name, nbytes in self.changes(unit).items():
                found[name] += nbytes
        return found

    # --- FSDP ---------------------------------------------------------------------------------------------------------

    def _buffers(self, stage: int, segment: int = 1) -> _Buffers:
        """A reduction works in a copy of its unit's gradients, which stays until the next one starts; a gather is
        copied out of its buffer, and the last of a forward stays until the loss. Level 3 gathers the next unit while
        one runs. Layers that are recomputed together are one unit."""
        zero, own = self.setting.zero, self.recipe
        if not zero:
            return _Buffers()
        wide, narrow = own.master_bytes or own.parameter_bytes, own.parameter_bytes
        unit = segment * max((c.unit.trained for c in self.classes), default=0.0)
        if not self.reduces_at_once:
            return _Buffers(first_end=unit * narrow)
        root = sum(end.trained for end in self.end_units(stage))
        head = self.ends[1][1].trained if stage == self.pp - 1 else 0.0
        left = (root or unit) * wide  # of the last micro-batch
        found = _Buffers(
            first_end=unit * narrow, first_layer=unit * wide,
            end=max(unit * narrow, left), layer=max(unit * wide, left),
            late=max(root * narrow + unit * wide, root * (narrow + wide)), waiting=head * narrow,
        )  # fmt: skip
        if zero < 3:
            return found
        whole = sum(end.parameters for end in self.end_units(stage)) * narrow
        gathered = segment * max((c.unit.parameters for c in self.classes), default=0.0) * narrow
        return replace(found, first_end=whole + gathered, first_layer=whole + 2 * gathered + found.first_layer,
                       end=whole + gathered + left, layer=whole + 2 * gathered + found.layer,
                       late=whole + found.late)  # fmt: skip

    # --- bounds -------------------------------------------------------------------------------------------------------

    def least_beside(
        self, flight: Floats, share: Floats, chunks: Floats, schedules: Sequence[str]
    ) -> tuple[Floats, Floats]:
        """[run, stage]: bytes that a stage holds beside its layers and what they keep, at an end (if it has one) and in
        a layer, with so many micro-batches in flight and that share of gradients. Under settings that differ in
        schedule, chunks and flight."""
        turns_late = np.array([schedule in ("gpipe", "zero-bubble") for schedule in schedules])
        held = np.where(turns_late, flight[:, -1], np.minimum(1.0, flight[:, -1] * chunks))
        common = np.tile([self.static_bytes(s) for s in range(self.pp)], (len(flight), 1))
        if self.pp > 1:
            outputs = flight * chunks[:, None] + 1
            outputs[:, -1] -= 1 + held
            common += outputs * self.blocks.border_bytes
        common[:, -1] += np.maximum(0.0, held - 1) * self.blocks.epilogue.work.saved_bytes
        flies, begun = flight > 0, share > 0
        at_end, in_layer = common.copy(), common
        for s in {0, self.pp // 2, self.pp - 1}:  # those between the ends are alike
            here = slice(s, s + 1) if s in (0, self.pp - 1) else slice(1, -1)
            buffers, last = self._buffers(s), s == self.pp - 1
            early, late = (sum(self._end_changes(s, Flight(1, there)).values()) for there in (0.0, 1.0))
            changes = np.where((share[:, here] == 1) & flies[:, here], late, early)
            layer = np.where(begun[:, here] & flies[:, here], buffers.layer, buffers.first_layer)
            in_layer[:, here] += layer + changes + buffers.waiting
            loss = self._loss_bytes() if last else 0.0
            at_end[:, here] += loss + np.where(begun[:, here], buffers.end + changes, buffers.first_end)
            if not last and s > 0:
                at_end[:, here] = in_layer[:, here]
        return np.where(flies, at_end, in_layer), in_layer
