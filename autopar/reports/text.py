"""The report: what was chosen, what a step will cost and why, what it beat. A pure function of plan and search result.

A loaded plan reports by itself; alternatives and the cluster's limits are added when they are at hand. A number that
the plan does not hold is left out, never made up.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.mesh import AXES, Degrees
from autopar.placement import parse_placement
from autopar.plan import Plan, expand_path
from autopar.reports.quantities import bytes_text, count_text, percent_text, range_text, seconds_text
from autopar.reports.tables import WIDE, memory_table, table_of
from autopar.specs import ClusterSpec

__all__ = ["WIDTH", "render", "section", "to_text"]

WIDTH = 110


class Alternative(Protocol):
    """What the report reads of a candidate that lost (autopar.cost_model.search.Candidate)."""

    @property
    def degrees(self) -> Degrees: ...
    @property
    def sp(self) -> bool: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def checkpoint(self) -> str: ...
    @property
    def step_time_s(self) -> float | None: ...
    @property
    def time_s(self) -> Mapping[str, float]: ...
    @property
    def reason(self) -> str: ...


class Result(Protocol):
    """What the report reads of a search result."""

    @property
    def alternatives(self) -> Sequence[Alternative]: ...
    @property
    def statistics(self) -> Mapping[str, Any]: ...


TIME_NAMES = {
    "forward": "compute, forward",
    "backward": "compute, backward",
    "recompute": "recompute (checkpointing)",
    "tp_communication": "tensor-parallel communication",
    "cp_communication": "context-parallel communication",
    "dp_communication": "data-parallel communication",
    "pp_communication": "pipeline communication",
    "accumulation": "gradient accumulation",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "straggler": "waiting for the slowest node",
    "overhead": "overhead of a step",
}


def render(
    plan: Plan,
    result: Result | None = None,
    *,
    cluster: ClusterSpec | None = None,
    model: str = "",
    notices: Iterable[str] = (),
    width: int = WIDTH,
) -> str:
    """The whole report as plain text, at most `width` columns wide, ending in a newline."""
    parts: list[RenderableType] = [_heading(plan, cluster, model), _choices(plan)]
    timed = "step_time_s" in plan.prediction
    if timed:
        parts += [section("Where the step goes"), _time_table(plan.prediction)]
    if plan.prediction.get("peak_memory_bytes"):
        parts += [
            section("Memory at the peak, per device"),
            memory_table(plan.prediction, cluster, plan.degrees.pp, narrow=width < WIDE),
        ]
    if not timed:
        parts.append(Text("\nNo prediction: this plan was not priced."))
    if plan.prediction.get("largest_activations"):
        parts += [section("Largest tensors kept for the backward"), _activation_table(plan.prediction)]
    parts += [section("Layers"), _stage_table(plan)]
    if plan.parameters:
        parts += [section("Weights over tp"), _weight_table(plan)]
    if plan.prediction.get("collectives"):
        parts += [section("Collectives per step and device"), _collective_table(plan.prediction["collectives"])]
    if result is not None and result.alternatives:
        parts += [
            section("The nearest alternatives, and what each loses (each is within 5 % of the best of its degrees)"),
            _alternative_table(plan, result.alternatives, narrow=width < WIDE),
        ]
    statistics = result.statistics if result is not None else plan.solver
    if statistics:
        parts += [section("Search"), Text(_statistics_line(statistics))]
    notes = list(notices)
    if notes:
        parts += [section("Notices"), Text("".join(f"- {note}\n" for note in notes))]
    return to_text(Group(*parts), width)


def to_text(content: RenderableType, width: int) -> str:
    # No terminal is asked for its size or colours, so that the text is the same everywhere.
    written = io.StringIO()
    Console(file=written, width=width, color_system=None, force_terminal=False, highlight=False).print(content)
    text = written.getvalue()
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"


def _groups_text(plan: Plan) -> str:
    return ", ".join(f"{ranks}: {name}" for ranks, name in plan.groups.items())


def _heading(plan: Plan, cluster: ClusterSpec | None, model: str) -> Text:
    devices = f"{plan.degrees.world_size} devices"
    where = f"{cluster.name} ({devices})" if cluster is not None else devices
    return Text(f"autopar plan {plan.fingerprint}: {model + ' on ' if model else ''}{where}\n")


def section(title: str) -> Text:
    return Text(f"\n{title}\n")


def _choices(plan: Plan) -> Table:
    degrees = plan.degrees
    table = table_of("choice", "value", "meaning")
    replicas = f" on each of {degrees.dp} replicas" if degrees.dp > 1 else ""
    mesh = " x ".join(f"{axis} {getattr(degrees, axis)}" for axis in AXES)
    table.add_row("mesh", mesh, "outermost first; tp on neighbouring devices")
    table.add_row(
        "batch",
        f"{plan.global_batch} x {plan.seq_len} tokens",
        f"{plan.micro_batches} x micro-batch of {plan.micro_batch}{replicas}",
    )
    chunks = f", {plan.virtual_stages} chunks a rank" if plan.virtual_stages > 1 else ""
    table.add_row("schedule", plan.schedule + chunks, "" if degrees.pp > 1 else "one stage: plain accumulation")
    sharded = "on" if plan.sequence_sharding else "off"
    table.add_row("sequence sharding", sharded, "residual stream split over tp" if plan.sequence_sharding else "")
    table.add_row("checkpointing", _checkpoint_text(plan), "")
    table.add_row("ZeRO", str(plan.zero), "")
    table.add_row("precision", plan.precision, "")
    if plan.groups:
        table.add_row("ranks of groups", _groups_text(plan), "start these ranks on nodes of these groups")
    if plan.overlap:
        table.add_row("overlap", ", ".join(plan.overlap), "hidden behind compute")
    return table


def _checkpoint_text(plan: Plan) -> str:
    modes = [plan.checkpoint_mode(path) for stage in plan.layer_paths() for path in stage]
    counts = {mode: modes.count(mode) for mode in dict.fromkeys(modes)}
    whole = f", {plan.checkpoint_segment} layers at a time" if plan.checkpoint_segment > 1 else ""
    names = {mode: mode + (whole if mode == "full" else "") for mode in counts}
    if len(counts) == 1:
        return next(iter(names.values()))
    return ", ".join(
        f"{names[mode]} on {n} of {len(modes)} layers" for mode, n in sorted(counts.items()) if mode != "none"
    )


def _time_table(prediction: Mapping[str, Any]) -> Table:
    step_s = float(prediction["step_time_s"])
    table = table_of("part", "time", "share", numbers=2)
    for key, seconds in prediction.get("time_s", {}).items():
        if seconds:
            table.add_row(TIME_NAMES.get(key, key), seconds_text(seconds), percent_text(seconds / step_s))
    table.add_section()
    table.add_row("step", seconds_text(step_s), "")
    if "tokens_per_s_per_device" in prediction:
        table.add_row("tokens per second and device", f"{prediction['tokens_per_s_per_device']:,.0f}", "")
    if "mfu" in prediction:
        table.add_row("model FLOPs utilisation", "", percent_text(prediction["mfu"]))
    if "cost_per_million_tokens" in prediction:
        table.add_row("cost of a million tokens", f"{prediction['cost_per_million_tokens']:.3g}", "")
    return table


def _activation_table(prediction: Mapping[str, Any]) -> Table:
    table = table_of("made by", "bytes a micro-batch and device", "layers", numbers=2)
    for entry in prediction["largest_activations"]:
        table.add_row(str(entry["tensor"]), bytes_text(entry["bytes"]), str(entry["layers"]))
    return table


def _stage_table(plan: Plan) -> Table:
    """With a pipeline also how long a stage's devices compute or send, with unequal groups whose they are."""
    busy, owner = plan.prediction.get("stage_busy"), plan.prediction.get("stage_group")
    step_s = plan.prediction.get("step_time_s", 0.0)
    columns = ["stage", "layers", "count", "ranks", *(["group"] if owner else []), *(["busy", "for"] if busy else [])]
    table = table_of(*columns, numbers=1, from_column=2)
    per_rank_block = plan.degrees.stride("pp")
    for index, entries in enumerate(plan.stages):
        # With several stages on a rank they go round the ranks in model order.
        first = (index % plan.degrees.pp) * per_rank_block
        count = sum(len(expand_path(entry)) for entry in entries)
        row = [str(index), _shortened(entries), str(count), range_text(first, first + per_rank_block - 1)]
        row += [owner[index]] if owner else []
        row += [percent_text(busy[index]), seconds_text(busy[index] * step_s)] if busy else []
        table.add_row(*row)
    return table


def _weight_table(plan: Plan) -> Table:
    table = table_of("weight", "placement", "each rank holds")
    for pattern, text in plan.parameters.items():
        table.add_row(pattern, text, _placement_meaning(text, plan.degrees.tp))
    return table


def _placement_meaning(text: str, tp: int) -> str:
    placement = parse_placement(text)
    if not placement.is_shard:
        return "the whole weight"
    fused = f", of each of the {placement.left} fused parts" if placement.left > 1 else ""
    return f"1/{tp} of dim {placement.dim}{fused}"


def _collective_table(collectives: Sequence[Mapping[str, Any]]) -> Table:
    table = table_of("for", "collective", "axis", "tensor", "times", numbers=2, from_column=3)
    for entry in collectives:
        table.add_row(
            str(entry.get("purpose", "")),
            entry["kind"],
            entry["axis"],
            bytes_text(entry["bytes"]),
            f"{entry['count']:,}",
        )
    return table


def _alternative_table(plan: Plan, alternatives: Sequence[Alternative], *, narrow: bool = False) -> Table:
    """`narrow` leaves out what is recomputed, and the time idle."""
    chosen_s = plan.prediction.get("step_time_s")
    recomputed, idleness = ((), ()) if narrow else (("checkpoint",), ("idle",))
    table = table_of(*AXES, "sp", "micro", "schedule", *recomputed, "step", "slower", *idleness, "why it loses")
    for other in alternatives:
        time = slower = idle = "-"
        if other.step_time_s is not None:
            time = seconds_text(other.step_time_s)
            slower = f"{100 * (other.step_time_s / chosen_s - 1):+.1f} %" if chosen_s else "-"
            idle = percent_text(other.time_s.get("bubble", 0.0) / other.step_time_s)
        table.add_row(
            *map(str, other.degrees.shape),
            "on" if other.sp else "off",
            str(other.micro_batch),
            other.schedule,
            *(() if narrow else (other.checkpoint,)),
            time,
            slower,
            *(() if narrow else (idle,)),
            other.reason,
        )
    return table


def _statistics_line(statistics: Mapping[str, Any]) -> str:
    shown = []
    for key, value in statistics.items():
        name = key.removesuffix("_s").replace("_", " ")
        if isinstance(value, bool | str):
            shown.append(f"{name} {value}")
        elif key.endswith("_s") or key == "bound":
            shown.append(f"{name} {seconds_text(float(value))}")
        elif isinstance(value, int):
            shown.append(f"{name} {count_text(value) if value >= 100_000 else format(value, ',')}")
        elif isinstance(value, float):
            shown.append(f"{name} {percent_text(value) if key == 'gap' else format(value, '.3g')}")
    return ", ".join(shown)


def _shortened(entries: Sequence[str]) -> str:
    return ", ".join(entries) if len(entries) <= 4 else f"{entries[0]}, ... {len(entries) - 2} more ..., {entries[-1]}"
