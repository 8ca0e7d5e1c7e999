"""`autopar size`: its options, its table and its JSON. The work is done by `autopar.sizing`."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from typing import TYPE_CHECKING, Any

from autopar.checks import require_count
from autopar.errors import SpecError

if TYPE_CHECKING:
    from torch import nn

    from autopar.models import ModelSource
    from autopar.sizing import Job, Offer, Size, Sizing
    from autopar.specs import TrainSpec

__all__ = ["add_options", "columns", "run"]

WIDTH = 130

TOKENS_PER_STEP = 4 * 2**20
"""Where no batch is stated: about what models of 1B to 400B parameters are published with."""

LONGEST_DEFAULT = 8192


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tokens", metavar="N", help="tokens to train on (15e12, 15T)")
    command.add_argument("--deadline", metavar="T", help="by when: 30d, 12h, 6w")
    command.add_argument(
        "--device", required=True, help="h100, a100-80g, ..., a node preset, or a cluster file to grow"
    )
    command.add_argument("--price", type=float, metavar="P", help="money per device and hour")
    command.add_argument("--counts", metavar="N,N,...", help="look at these counts of devices only")
    command.add_argument("--useful", type=float, default=1.0, help="fraction of the time that trains (default 1)")
    command.add_argument("--global-batch", type=int, metavar="N", help="sequences per step (default 4Mi tokens)")
    command.add_argument(
        "--seq-len", type=int, metavar="S", help="tokens per sequence (default: the model's, up to 8192)"
    )
    command.add_argument("--precision", help="fp32, bf16-mixed, ...; default: the device's")
    command.add_argument("--optimizer", default="adamw", help="adamw (default), adam or sgd")


def run(options: argparse.Namespace) -> int:
    """Prints the table or JSON; 0 unless an error is raised."""
    from autopar import units
    from autopar.sizing import Job, offer_of, size
    from autopar.specs import Pins

    pins = Pins.parse(options.pin)
    offer = offer_of(options.device)
    counts = _counts(options.counts, offer)
    tokens = None if options.tokens is None else units.count(options.tokens, "--tokens")
    deadline_s = None if options.deadline is None else units.duration_s(options.deadline, "--deadline")
    job = Job(tokens=tokens, tokens_per_step=1, deadline_s=deadline_s, price=options.price, useful=options.useful)
    if counts is None and (tokens is None or deadline_s is None):
        raise SpecError("--tokens and --deadline are needed to find a size", where="size",
                        try_="--tokens 15e12 --deadline 30d, or --counts 64,128,256")  # fmt: skip

    from autopar import api
    from autopar.models import resolve

    source = resolve(options.model)
    model = source.build(device="meta")
    train = _train(options, source, model)
    assert train.global_batch is not None
    assert train.seq_len is not None
    job = Job(**{**vars(job), "tokens_per_step": train.global_batch * train.seq_len})
    smallest = offer.cluster(counts[0] if counts else offer.devices_per_node)
    traced = api.capture(model, smallest, train, example=source.example())
    sizing = size(offer, job, traced.parameter_count,
                  lambda cluster: api.search_captured(traced, cluster, train, pins), counts,
                  lambda cluster: pins.check(cluster, train))  # fmt: skip
    best = sizing.smallest if options.price is None else sizing.cheapest or sizing.smallest
    if options.output and best is not None and best.plan is not None:
        best.plan.save(options.output)
    if options.json:
        print(json.dumps(_data(sizing, job, train), indent=2))
    else:
        _print(sizing, job, offer, train, source.name)
        if options.output and best is not None:
            print(f"plan for {best.devices} devices written to {options.output}")
    return 0


def _counts(text: str | None, offer: Offer) -> list[int] | None:
    if text is None:
        return None
    from autopar.specs import MOST_DEVICES

    found = []
    for part in text.split(","):
        if not part.strip().isdecimal() or len(part) > 12 or int(part) < 1:
            raise SpecError(f"{part!r} is no count of devices", where="--counts", try_="--counts 64,128,256")
        found.append(int(part))
    per_node = offer.devices_per_node
    most = MOST_DEVICES // per_node * per_node
    for count in found:
        if count > most:
            raise SpecError(f"{count} devices are too many", where="--counts", try_=f"at most {most}")
        if count % per_node and per_node % count:
            raise SpecError(f"{count} devices are no whole number of nodes of {per_node}", where="--counts",
                            try_=f"{max(1, round(count / per_node)) * per_node}")  # fmt: skip
        offer.cluster(count)
    return sorted(set(found))


def _train(options: argparse.Namespace, source: ModelSource, model: nn.Module) -> TrainSpec:
    from autopar.specs import TrainSpec

    for name in ("seq_len", "global_batch"):
        if getattr(options, name) is not None:
            require_count(getattr(options, name), f"--{name.replace('_', '-')}")
    seq_len = options.seq_len
    if seq_len is None:
        seq_len = min(_positions(source, model) or 2048, LONGEST_DEFAULT)
    if source.max_seq_len is not None and seq_len > source.max_seq_len:
        raise SpecError(f"{source.name} has learned positions for {source.max_seq_len} tokens", where="--seq-len",
                        try_=f"at most {source.max_seq_len}")  # fmt: skip
    batch = options.global_batch or max(1, TOKENS_PER_STEP // seq_len)
    return TrainSpec(global_batch=batch, seq_len=seq_len, precision=options.precision, optimizer=options.optimizer)


def _positions(source: ModelSource, model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    longest = getattr(text, "max_position_embeddings", None)
    return longest if isinstance(longest, int) else source.max_seq_len


def _data(sizing: Sizing, job: Job, train: TrainSpec) -> dict[str, Any]:
    def row(found: Size) -> dict[str, Any]:
        if found.plan is None:
            return {"devices": found.devices, "plan": None, "reason": found.reason}
        prediction = found.plan.prediction
        finite = math.isfinite(found.train_s)
        return {
            "devices": found.devices,
            "meets_deadline": None if job.deadline_s is None else found.train_s <= job.deadline_s,
            "step_time_s": prediction["step_time_s"],
            "tokens_per_s": train.global_batch * train.seq_len / prediction["step_time_s"],  # type: ignore[operator]
            "mfu": prediction["mfu"],
            "train_s": found.train_s if finite else None,
            "device_hours": found.device_hours if finite else None,
            "cost": found.cost if finite else None,
            "cost_per_million_tokens": _per_million(found, job, train),
            "headroom_bytes": found.headroom_bytes,
            "plan": found.plan.to_data(),
        }

    devices = {name: getattr(sizing, name) and getattr(sizing, name).devices for name in ("smallest", "cheapest")}
    stated = {"tokens": job.tokens, "deadline_s": job.deadline_s, "price": job.price, "useful": job.useful}
    batch = {"global_batch": train.global_batch, "seq_len": train.seq_len}
    devices["left_from"] = sizing.left_from
    return {**stated, **batch, **devices, "sizes": [row(found) for found in sizing.sizes]}


def _per_million(found: Size, job: Job, train: TrainSpec) -> float | None:
    if job.price is None or found.plan is None:
        return None
    seconds_per_token = found.plan.prediction["step_time_s"] / (train.global_batch * train.seq_len)  # type: ignore[operator]
    return float(1e6 * seconds_per_token * found.devices / 3600 * job.price / job.useful)


def _print(sizing: Sizing, job: Job, offer: Offer, train: TrainSpec, model: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("devices", "step", "MFU", "days", "device hours", "cost", "per 1M tokens", "headroom"):
        if heading in ("cost", "per 1M tokens") and job.price is None:
            continue
        table.add_column(heading, justify="right")
    table.add_column("plan", overflow="fold")
    table.add_column("")
    for found in sizing.sizes:
        table.add_row(*_cells(found, job, train), _marks(found, sizing, job))
    print(f"{model} on {offer.name}, {train.global_batch} x {train.seq_len} tokens a step"
          + (f", {job.tokens:.4g} tokens" if job.tokens else "")
          + (f" within {job.deadline_s / 86400:.4g} days" if job.deadline_s else "")
          + (f", {job.useful:.0%} of the time training" if job.useful < 1 else "") + "\n")  # fmt: skip
    Console(width=columns(WIDTH), color_system=None, highlight=False).print(table)
    if sizing.left_from is not None:
        print(
            f"\nof {sizing.left_from:,} devices and fewer not all were looked at, some of them may do: --counts N,N,..."
        )


def columns(most: int) -> int:
    """Of the output: a terminal's own, at least 80; `most` where it is a file or a pipe."""
    if not sys.stdout.isatty():
        return most
    return min(most, max(80, shutil.get_terminal_size().columns))


def _cells(found: Size, job: Job, train: TrainSpec) -> list[str]:
    from autopar.reports.quantities import bytes_text, count_text, percent_text, seconds_text

    money = ["-", "-"] if job.price is not None else []
    if found.plan is None:
        return [f"{found.devices:,}", "-", "-", "-", "-", *money, "-", found.reason.partition(":")[0]]
    prediction, timed = found.plan.prediction, math.isfinite(found.train_s)
    if money:
        money = [f"{found.cost:,.0f}" if timed else "-", f"{_per_million(found, job, train):.3g}"]
    return [
        f"{found.devices:,}", seconds_text(prediction["step_time_s"]), percent_text(prediction["mfu"]),
        f"{found.train_s / 86400:.3g}" if timed else "-", count_text(found.device_hours) if timed else "-", *money,
        bytes_text(found.headroom_bytes), _plan_text(found),
    ]  # fmt: skip


def _plan_text(found: Size) -> str:
    plan = found.plan
    assert plan is not None
    degrees = " ".join(f"{axis}{size}" for axis, size in vars(plan.degrees).items() if size > 1) or "one device"
    modes = {plan.checkpoint_mode(path) for stage in plan.layer_paths() for path in stage} - {"none"}
    parts = [degrees, f"micro {plan.micro_batch}", *([f"zero{plan.zero}"] if plan.zero else []), *sorted(modes)]
    return ", ".join(parts)


def _marks(found: Size, sizing: Sizing, job: Job) -> str:
    marks = [name for name in ("smallest", "cheapest") if getattr(sizing, name) is found]
    if found.plan is not None and job.deadline_s is not None and found.train_s > job.deadline_s:
        marks.append("too late")
    return ", ".join(marks)
