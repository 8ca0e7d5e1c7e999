"""The plan: the only hand-off between search and rewriting. Data only, keyed by module path, editable by hand.

A plan says how a model is laid out over the mesh; passes follow it and never choose. What it does not spell out follows
by the propagation rule of `autopar.passes.shard_parameters`, so a hand-written plan can be short:

    Plan(degrees=Degrees(tp=2, pp=2), global_batch=8, seq_len=128, micro_batch=2,
         stages=(("model.layers.0-1",), ("model.layers.2-3",)),
         parameters={"model.layers.*.self_attn.q_proj.weight": "S(0)", ...})

Patterns: in a path, `*` stands for one component (`model.layers.*.mlp.up_proj.weight`); `0-7` as a component stands for
the integers 0 to 7. The first matching entry of a mapping holds, exact paths before patterns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.checks import shown
from autopar.errors import PlanMismatchError, SpecError, nearest
from autopar.mesh import Degrees
from autopar.plan_checks import (
    CHECKPOINT_MODES,
    CONTEXT_PARALLEL,
    LOOPED,
    SCHEDULES,
    check_fields,
    check_types,
    degrees_from,
    read_json,
)
from autopar.whole_file import write_whole

__all__ = [
    "BUCKET_BYTES",
    "CHECKPOINT_MODES",
    "CONTEXT_PARALLEL",
    "DEFAULT_OVERLAP",
    "LOOPED",
    "SCHEDULES",
    "SCHEMA_VERSION",
    "Plan",
    "expand_path",
    "is_pattern",
    "match_path",
]

SCHEMA_VERSION = 1
DEFAULT_OVERLAP = ("dp_reduce", "cp_ring", "zero3_gather")

BUCKET_BYTES = 25 * 2**20
"""Of data-parallel gradients that are summed at a time without ZeRO: priced so, and run so unless told otherwise."""


def _frozen(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(mapping))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one model trains on one mesh. Raises SpecError if a field is malformed.

    degrees            size of each mesh axis, `pp * dp * cp * tp` = world size
    global_batch       sequences per optimizer step, over all ranks
    seq_len            tokens per sequence the plan was priced for
    micro_batch        sequences per micro-batch and dp rank; `global_batch = dp * micro_batch * micro_batches`
    stages             per pipeline stage the module paths of its layers, in order; prologue and epilogue go with the
                       first and last stage. Several stages on a rank (virtual_stages > 1) are listed in model order
    schedule           one of SCHEDULES
    sequence_sharding  the residual stream between layers is S(1) over tp instead of replicated
    parameters         parameter path pattern -> placement over tp; a parameter not named is R
    ops                op key pattern (`module.path::aten_op#ordinal`) -> strategy "in, in -> out", where the
                       propagation rule would do otherwise
    checkpoint         layer path pattern -> one of CHECKPOINT_MODES; a layer not named is "none"
    checkpoint_segment consecutive "full" layers of a stage are recomputed together, that many at a time: only the
                       input of the first is kept
    zero               ZeRO level over dp x cp, the data ranks
    zero_group         dp ranks that share one sharded copy (hybrid sharding), each with its cp peers; 0 means all
    context_parallel   how attention reads the keys of other cp ranks: one of CONTEXT_PARALLEL
    precision          "fp64", "fp32", "bf16" (pure) or "bf16-mixed" (fp32 master weights)
    overlap            named overlaps that are switched on, of plan_checks.OVERLAPS; the default are those that cost
                       nothing and need no other kernels
    groups             rank range -> group of a cluster of unequal groups, whose devices these ranks must be
    prediction         what the cost model expects, by part; see autopar.cost_model.search
    fingerprints       "model", "cluster", "train": what the plan was made for; empty in a hand-written plan
    solver             how it was found: solver, status, bound, gap, counts
    """

    degrees: Degrees = Degrees()
    global_batch: int
    seq_len: int
    micro_batch: int
    stages: tuple[tuple[str, ...], ...]
    schedule: str = "1f1b"
    virtual_stages: int = 1
    sequence_sharding: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    ops: Mapping[str, str] = field(default_factory=dict)
    checkpoint: Mapping[str, str] = field(default_factory=dict)
    checkpoint_segment: int = 1
    zero: int = 0
    zero_group: int = 0
    context_parallel: str = "ring"
    precision: str = "fp32"
    overlap: tuple[str, ...] = DEFAULT_OVERLAP
    groups: Mapping[str, str] = field(default_factory=dict)
    prediction: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    solver: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("parameters", "ops", "checkpoint", "groups", "prediction", "fingerprints", "solver"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))
        object.__setattr__(self, "stages", tuple(tuple(stage) for stage in self.stages))
        object.__setattr__(self, "overlap", tuple(self.overlap))
        check_fields(self)

    # Mappings are read-only views, which neither pickle nor hash: both go through the plain data.
    def __reduce__(self) -> tuple[Any, ...]:
        return (_from_data, (self.to_data(),))

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each dp rank."""
        return self.global_batch // (self.degrees.dp * self.micro_batch)

    @property
    def fingerprint(self) -> str:
        """Hash of what is executed (not of predictions or solver notes); equal on all ranks before they start."""
        executed = {k: v for k, v in self.to_data().items() if k not in ("prediction", "solver")}
        if not self.groups:
            del executed["groups"]
        return hashlib.sha256(json.dumps(executed, sort_keys=True).encode()).hexdigest()[:16]

    def layer_paths(self) -> tuple[tuple[str, ...], ...]:
        """`stages` with ranges written out."""
        return tuple(tuple(p for entry in stage for p in expand_path(entry)) for stage in self.stages)

    def parameter_placement(self, path: str) -> str:
        return str(_lookup(self.parameters, path, "R"))

    def op_strategy(self, key: str) -> str | None:
        strategy: str | None = _lookup(self.ops, key, None)
        return strategy

    def checkpoint_mode(self, layer_path: str) -> str:
        return str(_lookup(self.checkpoint, layer_path, "none"))

    @property
    def shards_sequence(self) -> bool:
        """Whether the residual stream is sharded over tp; not where tp does not divide what a cp rank holds of it."""
        return self.sequence_sharding and self.degrees.tp > 1 and self.seq_len // self.degrees.cp % self.degrees.tp == 0

    def replace(self, **changes: Any) -> Plan:
        return replace(self, **changes)

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-able data in a stable field order."""
        data: dict[str, Any] = {"schema_version": self.schema_version}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "degrees":
                value = asdict(value)
            elif isinstance(value, Mapping):
                value = dict(value)
            elif f.name == "stages":
                value = [list(stage) for stage in value]
            elif isinstance(value, tuple):
                value = list(value)
            data[f.name] = value
        return data

    def dumps(self) -> str:
        return json.dumps(self.to_data(), indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_whole(self.dumps(), path, "the plan")

    @staticmethod
    def loads(text: str, where: str = "plan") -> Plan:
        """Read a plan's JSON. Raises as `load` does; `where` names the text in messages."""
        return _from_data(read_json(text, where), where)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file. Raises SpecError (unreadable, malformed) or PlanMismatchError (another schema version)."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path no system takes
            raise SpecError(f"cannot read the plan: {error}", where=str(path)) from error
        return Plan.loads(text, where=str(path))


def match_path(pattern: str, path: str) -> bool:
    """True if `path` is covered by `pattern` (`*` one component, `a-b` an integer range, the rest literally)."""
    wanted, _, wanted_op = pattern.partition("::")
    have, _, op = path.partition("::")
    if wanted_op != op or wanted.count(".") != have.count("."):
        return False
    return all(map(_match_component, wanted.split("."), have.split(".")))


def expand_path(entry: str) -> list[str]:
    """`"model.layers.2-4"` -> its three paths; an entry without a range is itself."""
    parts = entry.split(".")
    for i, part in enumerate(parts):
        bounds = _range(part)
        if bounds is not None:
            head, tail = parts[:i], parts[i + 1 :]
            return [".".join([*head, str(n), *tail]) for n in range(bounds[0], bounds[1] + 1)]
    return [entry]


def is_pattern(component: str) -> bool:
    """True if a component of a path stands for others: a module of this name cannot be planned."""
    return component == "*" or _range(component) is not None


def _match_component(pattern: str, part: str) -> bool:
    if pattern in ("*", part):
        return True
    bounds = _range(pattern)
    return bounds is not None and part.isdecimal() and bounds[0] <= int(part) <= bounds[1]


def _range(part: str) -> tuple[int, int] | None:
    low, dash, high = part.partition("-")
    return (int(low), int(high)) if dash and low.isdecimal() and high.isdecimal() else None


def _lookup(entries: Mapping[str, Any], path: str, default: Any) -> Any:
    if path in entries:
        return entries[path]
    return next((value for pattern, value in entries.items() if match_path(pattern, path)), default)


def _from_data(data: Mapping[str, Any], where: str = "plan") -> Plan:
    version = data.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise PlanMismatchError(
            f"plan schema version {shown(version)}, this autopar reads {SCHEMA_VERSION}",
            where=where,
            try_="plan again with this version",
        )
    known = [f.name for f in fields(Plan)]
    for key in data:
        if key not in known:
            raise SpecError(f"unknown key {key!r}", where=where, try_=nearest(key, known))
    required = ("global_batch", "seq_len", "micro_batch", "stages")
    missing = [key for key in required if key not in data]
    if missing:
        raise SpecError(f"missing {', '.join(missing)}", where=where)
    values = dict(data)
    try:
        values["degrees"] = degrees_from(values.get("degrees", {}), "degrees")
        return Plan(**values)
    except SpecError as error:
        raise SpecError(error.what, where=f"{where}: {error.where}", try_=error.try_) from error
