"""The outer search space: how work is cut (degrees, sequence sharding, micro-batch), and how each cut is run (schedule,
chunks, ZeRO level and group, exchange over cp).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from autopar.cost_model.no_degrees import no_degrees
from autopar.mesh import Degrees, divisors
from autopar.plan import LOOPED
from autopar.specs import Pins

__all__ = [
    "ModelLimits",
    "Partition",
    "Setting",
    "SettingGroup",
    "count_settings",
    "enumerate_partitions",
    "groups_of",
    "settings_of",
    "zero_levels",
]

SEGMENTS = (1, 2, 4, 8)
"""Layers recomputed together; a longer segment keeps little less and needs the working set of all its layers."""


@dataclass(frozen=True)
class ModelLimits:
    """What the model and the runtime allow.

    layers                of the model
    tp_is_legal           whether heads and weights divide over tp
    exchanges             (cp, tp) -> kinds of attention over a cut sequence that run; empty: none
    equal_layers          layers of one class
    splits_backward       zero-bubble runs: parameters computed in their own dtype, none frozen, one chain of layers
    shares_inside         a parameter is read in several places, one of them between the first layer and the last:
                          chunks of one rank may share it, which ZeRO cannot shard
    heads                 numbers of attention heads, for messages
    spans                 devices that each level of the network joins
    """

    layers: int
    tp_is_legal: Callable[[int], bool]
    exchanges: Callable[[int, int], tuple[str, ...]]
    equal_layers: bool = True
    splits_backward: bool = False
    shares_inside: bool = False
    heads: tuple[int, ...] = ()
    spans: tuple[int, ...] = ()


@dataclass(frozen=True)
class Partition:
    """How the work of a micro-batch is cut; prices of blocks depend on nothing else."""

    degrees: Degrees
    sequence_sharding: bool
    micro_batch: int
    global_batch: int

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.degrees.dp * self.micro_batch)

    @property
    def fills_rounds(self) -> bool:
        """True if looped schedules run: micro-batches in equal rounds, each with one for every stage."""
        pp, m = self.degrees.pp, self.micro_batches
        return m >= pp and m % (m // pp) == 0

    @property
    def order(self) -> tuple[int, ...]:
        """Ties go to fewer axes, then to less tp, less pp, less cp, no sequence sharding, larger micro-batches."""
        d = self.degrees
        axes = sum(size > 1 for size in d.shape)
        return (axes, d.tp, d.pp, d.cp, int(self.sequence_sharding), -self.micro_batch)


@dataclass(frozen=True)
class Setting:
    """One point of the outer search space. `zero_group`: dp ranks that share one sharded copy, 0: all of them."""

    partition: Partition
    schedule: str = "1f1b"
    virtual_stages: int = 1
    zero: int = 0
    zero_group: int = 0
    exchange: str = "ring"

    @property
    def degrees(self) -> Degrees:
        return self.partition.degrees

    @property
    def sequence_sharding(self) -> bool:
        return self.partition.sequence_sharding

    @property
    def micro_batch(self) -> int:
        return self.partition.micro_batch

    @property
    def micro_batches(self) -> int:
        return self.partition.micro_batches

    @property
    def zero_shard(self) -> int:
        """Ranks that share one sharded copy."""
        d = self.degrees
        return (self.zero_group or d.dp) * d.cp if self.zero else 1

    @property
    def order(self) -> tuple[int, ...]:
        """Ties of a partition go to less sharding, fewer chunks, the plainer schedule and exchange."""
        plainness = ("1f1b", "gpipe", "interleaved", "zero-bubble").index(self.schedule)
        exchange = ("ring", "all-gather", "all-to-all").index(self.exchange)
        return (*self.partition.order, self.zero, self.zero_group, self.virtual_stages, plainness, exchange)


@dataclass(frozen=True)
class SettingGroup:
    """Settings of a partition that differ in schedule and chunks a rank only; `runs`: (schedule, chunks) of each."""

    partition: Partition
    zero: int
    zero_group: int
    exchange: str
    runs: tuple[tuple[str, int], ...]

    def setting(self, index: int) -> Setting:
        schedule, chunks = self.runs[index]
        return Setting(self.partition, schedule, chunks, self.zero, self.zero_group, self.exchange)


def enumerate_partitions(
    num_devices: int, global_batch: int, seq_len: int, limits: ModelLimits, pins: Pins
) -> list[Partition]:
    """Every legal partition under the pins. Raises InfeasiblePlanError naming the rule or pin that leaves nothing."""
    found = list(_all_partitions(num_devices, global_batch, seq_len, limits, pins))
    if not found:
        raise no_degrees(
            num_devices, global_batch, seq_len, limits, pins,
            lambda devices, others: any(True for _ in _all_partitions(devices, global_batch, seq_len, limits, others)),
        )  # fmt: skip
    return found


def _all_partitions(
    num_devices: int, global_batch: int, seq_len: int, limits: ModelLimits, pins: Pins
) -> Iterator[Partition]:
    legal_tp = [d for d in divisors(num_devices) if limits.tp_is_legal(d)]
    for degrees in _degrees(num_devices, legal_tp, limits.layers, pins):
        if global_batch % degrees.dp == 0 and _is_legal(degrees, seq_len, limits, pins):
            yield from _partitions(degrees, global_batch, seq_len, limits, pins)


def _degrees(num_devices: int, legal_tp: list[int], layers: int, pins: Pins) -> Iterator[Degrees]:
    for tp in (tp for tp in legal_tp if pins.tp in (None, tp)):
        for pp in divisors(num_devices // tp) if pins.pp is None else [pins.pp]:
            if pp > max(1, layers) or num_devices % (tp * pp):
                continue
            rest = num_devices // (tp * pp)
            for dp in divisors(rest) if pins.dp is None else [pins.dp]:
                if rest % dp == 0 and pins.cp in (None, rest // dp):
                    yield Degrees(dp=dp, cp=rest // dp, tp=tp, pp=pp)


def _is_legal(degrees: Degrees, seq_len: int, limits: ModelLimits, pins: Pins) -> bool:
    """Whether the sequence can be cut, and some level of ZeRO is what the pins ask for."""
    levels = zero_levels(degrees, limits.spans, pins)
    return _cp_is_legal(degrees, seq_len, limits, pins) and next(levels, None) is not None


def _cp_is_legal(degrees: Degrees, seq_len: int, limits: ModelLimits, pins: Pins) -> bool:
    """The sequence is cut into 2 cp chunks, and the attention has a kernel for it."""
    if degrees.cp == 1:
        return True
    if seq_len % (2 * degrees.cp):
        return False
    kinds = limits.exchanges(degrees.cp, degrees.tp)
    return bool(kinds) and pins.context_parallel in (None, *kinds)


def _partitions(
    degrees: Degrees, global_batch: int, seq_len: int, limits: ModelLimits, pins: Pins
) -> Iterator[Partition]:
    sharding = [False]
    if degrees.tp > 1 and (seq_len // degrees.cp) % degrees.tp == 0:
        sharding = [False, True] if pins.sp is None else [pins.sp]
    elif pins.sp:
        return
    for micro_batch in divisors(global_batch // degrees.dp):
        if pins.microbatch in (None, micro_batch):
            for sp in sharding:
                partition = Partition(degrees, sp, micro_batch, global_batch)
                if _can_run(partition, limits, pins):
                    yield partition


def _can_run(partition: Partition, limits: ModelLimits, pins: Pins) -> bool:
    """Whether some schedule goes with some level of ZeRO."""
    runs, levels = list(_schedules(partition, limits, pins)), list(zero_levels(partition.degrees, limits.spans, pins))
    return any(zero == 0 or _shards(partition, limits, run) for run in runs for zero, _ in levels)


def groups_of(partition: Partition, limits: ModelLimits, pins: Pins) -> list[SettingGroup]:
    """Every way to run a partition that the pins and the runtime allow."""
    d = partition.degrees
    runs = tuple(_schedules(partition, limits, pins))
    whole = tuple(run for run in runs if _shards(partition, limits, run))
    return [
        SettingGroup(partition, zero, group, exchange, whole if zero else runs)
        for zero, group in zero_levels(d, limits.spans, pins)
        for exchange in _exchanges(d, limits, pins)
        if (whole if zero else runs)
    ]


def _shards(partition: Partition, limits: ModelLimits, run: tuple[str, int]) -> bool:
    """Whether ZeRO runs: under zero-bubble FSDP would reduce before the split backward has made weight gradients."""
    schedule, chunks = run
    return partition.degrees.pp == 1 or (schedule != "zero-bubble" and not (chunks > 1 and limits.shares_inside))


def _exchanges(degrees: Degrees, limits: ModelLimits, pins: Pins) -> tuple[str, ...]:
    if degrees.cp == 1:
        return ("ring",)
    return tuple(e for e in limits.exchanges(degrees.cp, degrees.tp) if pins.context_parallel in (None, e))


def settings_of(partition: Partition, limits: ModelLimits, pins: Pins) -> list[Setting]:
    """All settings of `groups_of`."""
    return [group.setting(i) for group in groups_of(partition, limits, pins) for i in range(len(group.runs))]


def count_settings(partitions: Iterable[Partition], limits: ModelLimits, pins: Pins) -> int:
    """Number of `settings_of` of all of them. The degrees, and which schedules fill them, say how many."""
    alike: dict[tuple[Degrees, bool, bool], list[Partition]] = defaultdict(list)
    for p in partitions:
        alike[p.degrees, p.micro_batches >= p.degrees.pp, p.fills_rounds].append(p)
    return sum(len(same) * _number_of_settings(same[0], limits, pins) for same in alike.values())


def _number_of_settings(partition: Partition, limits: ModelLimits, pins: Pins) -> int:
    d, runs = partition.degrees, list(_schedules(partition, limits, pins))
    whole = sum(_shards(partition, limits, run) for run in runs)
    total = sum(whole if zero else len(runs) for zero, _ in zero_levels(d, limits.spans, pins))
    return total * len(_exchanges(d, limits, pins))


def _schedules(partition: Partition, limits: ModelLimits, pins: Pins) -> Iterator[tuple[str, int]]:
    """(schedule, chunks a rank). Looped schedules go in equal rounds of micro-batches, and pay off only with one for
    each stage; gpipe takes as long as 1F1B and holds more, so it is for fewer micro-batches than stages, or a pin.
    Under zero-bubble nothing is recomputed: autograd would run a layer again for each weight gradient put off."""
    pp, m = partition.degrees.pp, partition.micro_batches
    wanted = pins.virtual_stages

    def asked(schedule: str, chunks: int = 1) -> bool:
        return pins.schedule in (None, schedule) and wanted in (None, chunks)

    if pp == 1:
        if wanted in (None, 1) and pins.schedule not in LOOPED:
            yield pins.schedule or "1f1b", 1
        return
    if m >= pp and asked("1f1b"):
        yield "1f1b", 1
    if asked("gpipe") and (m < pp or pins.schedule == "gpipe"):
        yield "gpipe", 1
    if not partition.fills_rounds:
        return
    whole = pins.checkpoint in (None, "none") and pins.zero in (None, 0)
    if limits.splits_backward and asked("zero-bubble") and whole:
        yield "zero-bubble", 1
    together = limits.equal_layers or pins.checkpoint_segment in (None, 1)  # see `PipelineProblem`
    most = limits.layers // pp if together else 1
    yield from (("interleaved", chunks) for chunks in range(2, most + 1) if asked("interleaved", chunks))


def zero_levels(degrees: Degrees, spans: tuple[int, ...], pins: Pins) -> Iterator[tuple[int, int]]:
    """(level, dp ranks that share a sharded copy; 0: all)."""
    if degrees.dp * degrees.cp == 1:
        if pins.zero in (None, 0) and pins.zero_group in (None, 0, 1):  # one data rank has nobody to share with
            yield 0, 0
        return
    for zero in (0, 1, 2, 3) if pins.zero is None else (pins.zero,):
        if pins.zero_group is None:
            yield from ((zero, group) for group in (0, *(_hybrid_groups(degrees, spans) if zero else ())))
        elif pins.zero_group in (0, degrees.dp):
            yield zero, 0
        elif zero and degrees.dp % pins.zero_group == 0:
            yield zero, pins.zero_group


def _hybrid_groups(degrees: Degrees, spans: tuple[int, ...]) -> Iterator[int]:
    """Groups that fill a level of the network: within a level a larger group holds less and takes hardly longer."""
    inner = degrees.tp * degrees.cp
    for span in spans:
        group = span // inner
        if span % inner == 0 and 1 < group < degrees.dp and degrees.dp % group == 0:
            yield group
