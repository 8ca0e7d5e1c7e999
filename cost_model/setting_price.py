"""All prices of one setting: the parts of its stages in seconds and bytes, as a pipeline problem and as a report.

Times are those of `step_price`, bytes those of `memory`; what the pipeline problem minimises leaves out the straggler
factor and the overhead of a step, which are the same for every setting of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.cost_model import memory
from autopar.cost_model.block_prices import BlockPrices
from autopar.cost_model.candidates import Setting
from autopar.cost_model.constant_table import load_constants
from autopar.cost_model.memory import Recipe
from autopar.cost_model.mode_mixes import LayerClass, LayerMode
from autopar.cost_model.model_prices import ModelPrices
from autopar.cost_model.own_stack import own_traits
from autopar.cost_model.pipeline_ilp import PipelineSolution
from autopar.cost_model.pipeline_problem import Moment, PipelineProblem, StageCost, StagePrice
from autopar.cost_model.run_layout import RunLayout, Unit
from autopar.cost_model.stage_memory import StageMemory
from autopar.cost_model.stage_table import bytes_at
from autopar.cost_model.step_price import StepPrice, add_parts
from autopar.specs import ClusterSpec

__all__ = ["EXCHANGES", "TIME_PARTS", "SettingPrice"]

_PART_NAMES = {
    "tp": "tp_communication", "cp": "cp_communication", "dp": "dp_communication", "pp": "pp_communication",
}  # fmt: skip
TIME_PARTS = (
    "forward", "backward", "recompute", "tp_communication", "cp_communication", "dp_communication",
    "pp_communication", "accumulation", "bubble", "optimizer", "straggler", "overhead",
)  # fmt: skip

EXCHANGES = {"ring": "ring", "all-gather": "all_gather", "all-to-all": "all_to_all"}


_FEW = 6
"""Moments, by chunks with gradients, that bounds look at."""


class SettingPrice:
    """Prices of one setting. Layers are counted by class, in the order of `ModelPrices.classes`."""

    def __init__(
        self, setting: Setting, blocks: BlockPrices, prices: ModelPrices, cluster: ClusterSpec, recipe: Recipe,
        modes: Sequence[str],
    ) -> None:  # fmt: skip
        self.setting, self.blocks, self.prices, self.cluster, self.recipe = setting, blocks, prices, cluster, recipe
        self.pp, self.m = setting.degrees.pp, setting.micro_batches
        self.classes = [blocks.layers[c] for c in prices.classes]
        self.equal_layers = len(self.classes) == 1
        layout = RunLayout(
            degrees=setting.degrees, layers=len(prices.traced.layers), seq_len=prices.seq_len,
            micro_batch=setting.micro_batch, micro_batches=self.m, virtual_stages=setting.virtual_stages,
            zero=setting.zero, zero_shard=setting.zero_shard, sequence_sharding=setting.sequence_sharding,
            cp_exchange=EXCHANGES[setting.exchange], schedule=setting.schedule,
        )  # fmt: skip
        traits = own_traits(
            cluster.stack, recipe, setting.zero, sequence_sharding=setting.sequence_sharding,
            schedule=setting.schedule,
        )  # fmt: skip
        constants = load_constants().of(cluster.device)
        self.step = StepPrice(layout, cluster, traits, prices.machine, constants, recipe)
        self._modes = modes
        self._parts: dict[tuple[int, str, int], dict[str, float]] = {}
        self._tails: dict[tuple[bool, bool, tuple[int, ...]], float] = {}
        self.send_s = self.step.send_s(blocks.border_bytes)
        epilogue = blocks.epilogue
        if self.pp == 1:  # one tensor where both ends are
            held = epilogue.parameters - blocks.tied_parameters
            sizes = {name: n for name, n in epilogue.sizes.items() if name not in blocks.prologue.sizes}
            epilogue = replace(epilogue, parameters=held, frozen=epilogue.frozen - blocks.tied_frozen, sizes=sizes)
        self.ends = [(0, blocks.prologue), (self.pp - 1, epilogue)]
        self.bytes = StageMemory(setting, blocks, self.classes, self.ends, recipe, list(prices.repeats.values()))

    # --- seconds ------------------------------------------------------------------------------------------------------

    def without_overhead(self, step_s: float) -> float:
        """Of a step's seconds, those that the pipeline problem counts."""
        return (step_s - self.step.overhead_s) / self.step.slowdown

    def with_overhead(self, busy_s: float) -> float:
        return busy_s * self.step.slowdown + self.step.overhead_s

    def modes_of(self, index: int) -> list[str]:
        """Modes of recomputation a layer class can run in; under zero-bubble none, see `candidates`."""
        if self.setting.schedule == "zero-bubble" and self.pp > 1:
            return ["none"]
        able = self.classes[index].has_attention
        named = [m for m in self._modes if able or m != "selective"]
        return named or ["none"]

    def layer_parts(self, index: int, mode: str, segment: int = 1) -> dict[str, float]:
        """Of a layer that is recomputed in segments of so many; the fewer, the less."""
        key = (index, mode, segment)
        if key not in self._parts:
            self._parts[key] = self.step.layer(self.classes[index].unit, mode, segment)
        return self._parts[key]

    @cached_property
    def fastest_s(self) -> list[float]:
        """Seconds of a layer of each class in its fastest mode."""
        return [
            min(sum(self.layer_parts(i, mode).values()) for mode in self.modes_of(i)) for i in range(len(self.classes))
        ]

    def least_tail_s(self, units: list[tuple[int, Unit]]) -> float:
        """Lower bound of the longest tail; `units`: layers and their number."""
        forward_s = sum(n * (u.price.forward_s + u.price.forward_communication_s) for n, u in units) / self.pp
        backward_s = sum(n * (u.price.backward_s + u.price.backward_communication_s) for n, u in units) / self.pp
        held = sum(n * u.trained for n, u in units) + sum(u.trained for _, u in self.ends)
        return self.step.least_tail_s(held / self.pp, forward_s, backward_s)

    def all_weights_s(self, units: list[tuple[int, Unit]]) -> float:
        """Weight gradients of the whole model; `units`: layers and their number."""
        return sum(n * self.step.all_weights_s(unit) for n, unit in [*units, *((1, u) for _, u in self.ends)])

    def ends_s(self, stage: int) -> float:
        """Seconds of a micro-batch in the ends that a stage has."""
        return sum(sum(self.step.end(unit).values()) for unit in self.end_units(stage))

    def end_units(self, stage: int) -> Iterator[Unit]:
        return (unit for here, unit in self.ends if here == stage)

    def trained(self, stage: int, counts: Sequence[int]) -> float:
        """Local elements on a stage that are trained."""
        held = sum(n * layer.unit.trained for n, layer in zip(counts, self.classes, strict=True))
        return held + sum(unit.trained for unit in self.end_units(stage))

    def tail_parts(self, stage: int, counts: Sequence[int]) -> dict[str, float]:
        units = [(n, layer.unit.price) for n, layer in zip(counts, self.classes, strict=True)]
        forward_s = sum(n * (p.forward_s + p.forward_communication_s) for n, p in units)
        backward_s = sum(n * (p.backward_s + p.backward_communication_s) for n, p in units)
        step_tp_s = sum(n * p.step_communication_s for n, p in units)
        step_tp_s += sum(unit.price.step_communication_s for unit in self.end_units(stage))
        parts = sum(counts) + any(unit.parameters for unit in self.end_units(stage))  # FSDP: a layer, or the rest
        return self.step.tail(self.trained(stage, counts), forward_s, backward_s, step_tp_s, parts)

    def _tail_s(self, stage: int, counts: tuple[int, ...]) -> float:
        """Stages between the first and the last are alike."""
        key = (stage == 0, stage == self.pp - 1, counts)
        if key not in self._tails:
            self._tails[key] = sum(self.tail_parts(stage, counts).values())
        return self._tails[key]

    def time_parts(self, solution: PipelineSolution) -> dict[str, float]:
        """Step time by part, read off the slowest stage; what the others make it wait is bubble."""
        stages = list(enumerate(solution.stages))
        return self.named_step(
            [self.stage_parts(s, stage, solution.segment) for s, stage in stages],
            [self.tail_parts(s, stage.counts) for s, stage in stages],
            [self.weights_s(s, stage.counts) for s, stage in stages],
        )

    def named_step(
        self, stages: Sequence[Mapping[str, float]], tails: Sequence[Mapping[str, float]], weights_s: Sequence[float]
    ) -> dict[str, float]:
        """`StepPrice.step` under the names of TIME_PARTS."""
        parts = self.step.step(stages, tails, weights_s)
        named = {_PART_NAMES.get(name, name): seconds for name, seconds in parts.items()}
        return {name: named.get(name, 0.0) for name in TIME_PARTS}

    def layers_s(self) -> float:
        """Seconds of one micro-batch through all layers, each in its fastest mode."""
        return sum(n * t for n, t in zip(self.prices.repeats.values(), self.fastest_s, strict=True))

    def stage_parts(self, stage: int, price: StagePrice, segment: int = 1) -> dict[str, float]:
        layers = [
            (n, self.layer_parts(i, mode, segment))
            for i, chosen in enumerate(price.modes)
            for n, mode in zip(chosen, self.modes_of(i), strict=True)
            if n
        ]
        return add_parts(*layers, *(self.step.end(unit) for unit in self.end_units(stage)), {"pp": self.send_s})

    def weights_s(self, stage: int, counts: Sequence[int]) -> float:
        total = sum(n * self.step.weights_s(layer.unit) for n, layer in zip(counts, self.classes, strict=True))
        return total + sum(self.step.weights_s(unit) for unit in self.end_units(stage))

    # --- bytes --------------------------------------------------------------------------------------------------------

    def memory(self, solution: PipelineSolution) -> tuple[dict[str, int], ...]:
        """Peak bytes by category of each stage; of each chunk of a rank, its rank's."""
        problem = self.problem(solution.segment)
        ranks = [self.stage_bytes(s, stage, problem) for s, stage in enumerate(solution.stages)]
        return tuple(ranks * self.setting.virtual_stages)

    def stage_bytes(self, stage: int, price: StagePrice, problem: PipelineProblem) -> dict[str, int]:
        """By category, at the moment at which the stage holds most."""

        def held(moment: Moment) -> float:
            return bytes_at(problem, stage, price.counts, moment, price.kept_bytes, price.working_bytes)

        peak = max(problem.stages[stage].moments, key=held)
        parts = dict.fromkeys(memory.CATEGORIES, 0.0)
        layers = [(n, layer.unit) for n, layer in zip(price.counts, self.classes, strict=True)]
        for n, unit in [*layers, *((1, unit) for unit in self.bytes.end_units(stage))]:
            for name, nbytes in self.bytes.state_of(unit).items():
                parts[name] += n * nbytes
        for n, unit in layers:
            for name, nbytes in self.bytes.changes(unit).items():
                parts[name] += peak.gradients * n * nbytes
        parts["activations"] = peak.in_flight * problem.stages[stage].saved_bytes
        parts["activations"] += peak.kept_flight(sum(price.counts)) * price.kept_bytes
        parts["activations"] += price.working_bytes if peak.in_layer else 0.0
        for name, nbytes in peak.beside.items():
            parts[name] += nbytes
        assert abs(sum(parts.values()) - price.memory_bytes) <= 1e-6 * price.memory_bytes, (parts, price.memory_bytes)
        parts["reserved"] = float(self.cluster.device.reserved_bytes)
        return {name: round(nbytes) for name, nbytes in parts.items()} | {"total": round(sum(parts.values()))}

    # --- the pipeline problem -----------------------------------------------------------------------------------------

    @property
    def most_layers(self) -> int:
        """Layers of the largest chunk there can be: a rank spreads its own evenly over its chunks."""
        chunks = self.setting.virtual_stages
        rank = len(self.prices.traced.layers) - chunks * (self.pp - 1)
        return max(1, -(-rank // chunks))

    def problem(self, segment: int = 1, most_moments: int | None = None) -> PipelineProblem:
        """`most_moments`: see `StageMemory.moments`."""
        index = {c: i for i, c in enumerate(self.prices.classes)}
        device = self.cluster.device
        return PipelineProblem(
            layers=tuple(index[s.class_id] for s in self.prices.traced.layers),
            classes=tuple(self.layer_class(i, segment) for i in range(len(self.classes))),
            stages=tuple(self.stage_cost(s, segment, most_moments) for s in range(self.pp)),
            micro_batches=self.m,
            memory_bytes=device.memory_bytes - device.reserved_bytes,
            tail_s=self._tail_s,
            virtual_stages=self.setting.virtual_stages,
            segment=segment,
        )

    def least_problem(self, segment: int, longest: int) -> PipelineProblem:
        """One that takes no longer than any with segments between the two: a layer that is recomputed keeps its share
        of the longest, takes and works in what it does in the shortest; the tail is the least there is."""

        def shared(mode: LayerMode) -> LayerMode:
            saved = mode.saved_bytes / (longest if mode.name == "full" else 1)
            return replace(mode, saved_bytes=saved)

        found = self.problem(segment, _FEW)
        classes = tuple(replace(c, modes=tuple(map(shared, c.modes))) for c in found.classes)
        found = replace(found, classes=classes, segment=1)
        put_off_s = [c.put_off_s for c in classes] + [stage.put_off_s for stage in found.stages]
        if any(put_off_s):  # each stage's own comes on top of its tail
            return found
        units = [(n, layer.unit) for n, layer in zip(self.prices.repeats.values(), self.classes, strict=True)]
        tail_s = self.least_tail_s(units)
        return replace(found, tail_s=lambda stage, counts: tail_s)

    def layer_class(self, index: int, segment: int = 1) -> LayerClass:
        layer = self.classes[index]
        modes = tuple(
            LayerMode(mode, sum(self.layer_parts(index, mode, segment).values()), *self.bytes.layer_bytes(index, mode))
            for mode in self.modes_of(index)
        )
        return LayerClass(modes, self.bytes.layer_static_bytes(index), 2 * self.step.weights_s(layer.unit),
                          self.bytes.whole_bytes(index), self.bytes.gradient_bytes(layer.unit))  # fmt: skip

    def stage_cost(self, stage: int, segment: int = 1, most_moments: int | None = None) -> StageCost:
        return StageCost(
            time_s=self.ends_s(stage) + self.send_s,
            static_bytes=self.bytes.static_bytes(stage),
            saved_bytes=self.bytes.glue_bytes if stage == 0 else 0.0,
            moments=self.bytes.moments(stage, segment, most_moments),
            put_off_s=2 * sum(self.step.weights_s(unit) for unit in self.end_units(stage)),
        )

    # --- what was chosen ----------------------------------------------------------------------------------------------

    def recomputed_layers(self, solution: PipelineSolution, *modes: str) -> int:
        """Layers of the model that run in one of the modes."""
        return sum(
            n for stage in solution.stages for i, chosen in enumerate(stage.modes)
            for n, mode in zip(chosen, self.modes_of(i), strict=True) if mode in modes
        )  # fmt: skip

    def executed_flops(self, solution: PipelineSolution) -> float:
        """Of a step, on all devices; recomputed forwards by their share of a layer's seconds."""
        total, segment = 0.0, solution.segment
        for s, stage in enumerate(solution.stages):
            for i, chosen in enumerate(stage.modes):
                price = self.classes[i].unit.price
                for n, mode in zip(chosen, self.modes_of(i), strict=True):
                    again = (
                        self.layer_parts(i, mode, segment)["recompute"] / price.forward_s if price.forward_s else 0.0
                    )
                    total += n * (price.forward_flops * (1 + again) + price.backward_flops)
            total += sum(unit.price.forward_flops + unit.price.backward_flops for unit in self.end_units(s))
        d = self.setting.degrees
        return total * self.m * d.tp * d.dp * d.cp
