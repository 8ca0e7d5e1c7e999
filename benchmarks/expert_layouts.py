"""The layouts that experts ran against the plan that is chosen for the same job, both priced by the same model.

    python benchmarks/expert_layouts.py --data runs.jsonl
    python benchmarks/expert_layouts.py --data runs.jsonl --source megatron --limit 5 --json

Rows of published measurements (docs/cost_model.md) whose source begins with one of --source (default megatron, dgxc and
nemo, both NeMo's, torchtitan, bloom) and whose tier is one of --tier (default A; B: some of the row is inferred). A
row's layout is a search in which every knob is pinned; the plan is the search with every knob free. So a plan slower
than the layout would be a fault of the search, and ends in exit status 1. For each knob that differs, the layout is
searched again with that knob alone set free: `knob` names the one that gains most by itself. Rows whose layout our
memory model or runtime refuses are listed apart with the reason.

Both sides are trained as autopar would (bf16-mixed, its own overlaps and memory), whatever the row's stack did: the
gain is the search's, not the stack's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from published_rows import Run, as_run, read_rows
from reference_models import BlockShape, ReferenceModel, example

from autopar.cost_model.search import search
from autopar.errors import AutoparError, InfeasiblePlanError, SpecError
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace

SOURCES = ("megatron", "dgxc", "nemo", "torchtitan", "bloom")
KNOBS = {
    "degrees": ("dp", "cp", "tp", "pp"),
    "sequence sharding": ("sp",),
    "micro-batch": ("microbatch",),
    "schedule": ("schedule", "virtual_stages"),
    "ZeRO": ("zero", "zero_group"),
    "checkpointing": ("checkpoint",),
}
_MODES = {"none": "none", "selective": "selective", "op": "selective-ops", "full": "full"}


def pins_of(run: Run) -> Pins:
    """The row's layout, every knob pinned."""
    layout, d = run.layout, run.layout.degrees
    group = None
    if layout.zero and layout.zero_shard != d.dp * d.cp:
        if layout.zero_shard % d.cp:
            raise SpecError(f"shards over {layout.zero_shard} ranks leave cp {d.cp} groups apart", where=run.id)
        group = layout.zero_shard // d.cp
    schedule, chunks = None, 1
    if d.pp > 1:
        chunks = layout.virtual_stages
        schedule = "interleaved" if chunks > 1 else "1f1b" if layout.micro_batches >= d.pp else "gpipe"
    return Pins(
        dp=d.dp, cp=d.cp, tp=d.tp, pp=d.pp, sp=layout.sequence_sharding if d.tp > 1 else None,
        microbatch=layout.micro_batch, schedule=schedule, virtual_stages=chunks,
        zero=layout.zero if d.dp * d.cp > 1 else 0, zero_group=group,
        checkpoint=_MODES[layout.recompute],
    )  # fmt: skip


@cache
def captured(shape: BlockShape, layers: int, positions: int) -> TracedModel:
    with torch.device("meta"):
        model = ReferenceModel(shape, positions, layers)
    return prepare(trace(model.to(torch.bfloat16), example(shape)))


def compare(run: Run, plans: dict[tuple[str, ...], Plan]) -> dict[str, Any]:
    """Seconds of the layout and of the plan, and what each knob gains by itself; `plans` are those of jobs before.

    Raises AutoparError if the layout is refused."""
    pins = pins_of(run)
    traced = captured(run.shape, run.layout.layers, run.layout.seq_len)
    train = TrainSpec(global_batch=run.plan.global_batch, seq_len=run.layout.seq_len, precision="bf16-mixed")
    cluster = replace(run.cluster, name="published")
    layout = search(traced, cluster, train, pins).plan
    job = (traced.fingerprint, cluster.fingerprint, train.fingerprint)
    if job not in plans:
        plans[job] = search(traced, cluster, train).plan
    plan = plans[job]
    layout_s, plan_s = (p.prediction["step_time_s"] for p in (layout, plan))
    gains = dict(_gains(traced, cluster, train, pins, layout, plan))
    knob = max(gains, key=gains.__getitem__, default="")
    return {
        "id": run.id, "measured_s": run.step_s, "layout": _text(layout), "layout_s": layout_s, "plan": _text(plan),
        "plan_s": plan_s, "gain": layout_s / plan_s - 1, "knob": knob, "knob_gains": gains,
    }  # fmt: skip


def _gains(
    traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins, layout: Plan, plan: Plan
) -> Iterator[tuple[str, float]]:
    for name, fields in KNOBS.items():
        if all(_value(layout, field) == _value(plan, field) for field in fields):
            continue
        freed = replace(pins, **dict.fromkeys(fields))
        if name == "degrees":  # chunks and sharding are of these degrees
            freed = replace(freed, sp=None, schedule=None, virtual_stages=None)
        try:
            alone_s = search(traced, cluster, train, freed).plan.prediction["step_time_s"]
        except AutoparError:  # the other pins belong to the degrees that were set free
            continue
        yield name, layout.prediction["step_time_s"] / alone_s - 1


def _value(plan: Plan, field: str) -> Any:
    values = {"sp": plan.sequence_sharding, "microbatch": plan.micro_batch, "checkpoint": dict(plan.checkpoint),
              **vars(plan.degrees)}  # fmt: skip
    return values[field] if field in values else getattr(plan, field)


def _text(plan: Plan) -> str:
    degrees = " ".join(f"{axis}{n}" for axis, n in vars(plan.degrees).items() if n > 1) or "one"
    modes = [plan.checkpoint_mode(path) for stage in plan.layer_paths() for path in stage]
    kinds = "+".join(f"{mode}" for mode in sorted(set(modes)))
    chunks = f" v{plan.virtual_stages}" if plan.virtual_stages > 1 else ""
    sharding = " sp" if plan.sequence_sharding else ""
    return f"{degrees}{sharding} mb{plan.micro_batch}{chunks} z{plan.zero} {kinds}"


def main() -> int:
    parser = argparse.ArgumentParser(description="published layouts against the chosen plan, by one model")
    parser.add_argument("--data", type=Path, required=True, help="published runs, one JSON object a line")
    parser.add_argument("--source", action="append", help="beginning of a source's name; may be repeated")
    parser.add_argument("--tier", action="append", choices=("A", "B"), help="tiers of rows; may be repeated")
    parser.add_argument("--limit", type=int, help="rows a source, at most")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        rows = read_rows(options.data)
    except (OSError, AutoparError) as error:
        parser.error(str(error))
    found: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    seen: dict[str, int] = {}
    plans: dict[tuple[str, ...], Plan] = {}
    for row in rows:
        source = str(row.get("source_id"))
        if row.get("tier") not in (options.tier or ["A"]) or not source.startswith(tuple(options.source or SOURCES)):
            continue
        seen[source] = seen.get(source, 0) + 1
        if options.limit is not None and seen[source] > options.limit:
            continue
        try:
            found.append(compare(as_run(row), plans))
        except InfeasiblePlanError as error:
            refused[str(row.get("id"))] = error.what.partition(", which needs")[0]
            continue
        except AutoparError as error:
            refused[str(row.get("id"))] = str(error)
            continue
        if not options.json:
            _print(found[-1])
    slower = [entry["id"] for entry in found if entry["gain"] < -1e-9]
    if options.json:
        print(json.dumps({"rows": found, "refused": refused, "slower": slower}, indent=2))
    else:
        _summary(found, refused, slower)
    return 1 if slower else 0


def _print(entry: dict[str, Any]) -> None:
    layout, plan = (f"{entry[name]} {entry[name + '_s']:.3g} s" for name in ("layout", "plan"))
    knob = f"{entry['knob']} {entry['knob_gains'][entry['knob']]:+.1%} alone" if entry["knob"] else "as published"
    print(f"{entry['id']:24} {layout:44} -> {plan:48} {entry['gain']:+7.1%}  {knob}", flush=True)


def _summary(found: list[dict[str, Any]], refused: dict[str, str], slower: list[str]) -> None:
    print(f"\n{len(found)} layouts compared, {len(refused)} refused, {len(slower)} faster than the chosen plan")
    if found:
        gains = sorted(entry["gain"] for entry in found)
        print(f"gain: median {gains[len(gains) // 2]:.1%}, least {gains[0]:.1%}, most {gains[-1]:.1%}")
    for name, reason in refused.items():
        print(f"  {name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
