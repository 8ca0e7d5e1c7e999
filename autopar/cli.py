"""The command line: `autopar plan`, `autopar size`, `autopar verify`, `autopar dryrun`, `calibrate`, `report`.

An error meant for the user is one line on stderr and exit code 2, with nothing written; `verify` exits with 1 when the
parallel run differs from the single process, `dryrun` when a rank's collectives are not the predicted ones. Everything
heavy is imported by the command that needs it. `--traceback` adds where an error came from. The options stand in
`command_options`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar import size_command
from autopar.command_options import parser
from autopar.errors import AutoparError, SpecError
from autopar.whole_file import is_special, write_whole

if TYPE_CHECKING:
    from autopar.cost_model.search_result import SearchResult
    from autopar.models import ModelSource
    from autopar.search_spec import SearchSpec
    from autopar.specs import ClusterSpec, Pins, TrainSpec
    from autopar.verify import MatrixResult, VerifyResult

__all__ = ["main"]

USER_ERROR, DIFFERS = 2, 1
READER_GONE = 128 + 13
"""As a shell reports a process that SIGPIPE ended."""

RANKS_PER_CORE, RANK_BYTES = 16, 256 * 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    options = parser(RUNS).parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who read the output has seen enough: `autopar plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except Exception as error:  # noqa: BLE001 - the border of the process: whatever it was ends in one line
        if options.traceback:
            traceback.print_exception(error)
        print(f"autopar: error: {_one_line(error)}", file=sys.stderr)
        return USER_ERROR


def _one_line(error: Exception) -> str:
    if isinstance(error, AutoparError):
        return " ".join(str(error).split())
    from autopar.user_code import error_text

    return f"{error_text(error)}. Try: --traceback to see where it came from"


def _search_spec(options: argparse.Namespace) -> SearchSpec:
    from autopar import units
    from autopar.plan import Plan
    from autopar.search_spec import SearchSpec

    limit = options.time_limit
    return SearchSpec(
        objective=options.objective,
        memory_headroom=options.memory_headroom,
        solver=options.solver,
        time_limit_s=limit and units.duration_s(limit, "--time-limit"),
        keep=Plan.load(options.keep) if options.keep else None,
    )


def _priced(cluster: ClusterSpec, price: float | None) -> ClusterSpec:
    return cluster if price is None else replace(cluster, device=replace(cluster.device, price_per_hour=price))


def _plan(options: argparse.Namespace) -> int:
    from autopar.specs import ClusterSpec, Pins, TrainSpec

    # Everything a typing error can hit comes before the imports and the capture that take seconds.
    pins = Pins.parse(options.pin)
    cluster = _priced(ClusterSpec.parse(options.cluster), options.price)
    train = TrainSpec(
        global_batch=options.global_batch,
        seq_len=options.seq_len,
        precision=options.precision,
        optimizer=options.optimizer,
    )
    spec = _search_spec(options)
    pins.check(cluster, train)
    _check_output(options.output)

    from autopar.models import resolve

    source = resolve(options.model)
    _check_sequence(source, options.seq_len)
    result = _search(source, cluster, train, pins, spec)
    if options.output:
        result.plan.save(options.output)
    if options.json:
        print(json.dumps(_plan_json(result), indent=2))
        return 0

    from autopar.reports.text import WIDTH, render

    spent = result.statistics
    width = size_command.columns(WIDTH)
    _print(render(result.plan, result, cluster=cluster, model=source.name, notices=result.notices, width=width))
    print(f"\ncapture {spent['capture_s']:.1f} s, search {spent['search_s']:.1f} s")
    if options.output:
        print(f"plan written to {options.output}")
    return 0


def _size(options: argparse.Namespace) -> int:
    _check_output(options.output)
    return size_command.run(options)


def _search(source: ModelSource, cluster: ClusterSpec, train: TrainSpec, pins: Pins, spec: SearchSpec) -> SearchResult:
    from autopar.api import find_plan

    return find_plan(source.build(device="meta"), cluster, train, example=source.example(), pins=pins, search=spec)


def _plan_json(result: SearchResult) -> dict[str, Any]:
    spent = {key: round(result.statistics[key], 3) for key in ("capture_s", "search_s")}
    kept = ("solver", "status", "gap", "bound_s", "variables", "constraints", "candidates", "pruned", "solved")
    counts = {key: result.statistics[key] for key in kept}
    plan = result.plan.to_data()
    return {**spent, **counts, "plan": plan, "prediction": plan["prediction"]}


def _verify(options: argparse.Namespace) -> int:
    from autopar.specs import Pins

    pins = Pins.parse(options.pin)
    for name in ("ranks", "all", "steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise SpecError(f"must be a positive integer, not {value}", where=f"--{name}")
    _check_ranks(options.ranks or options.all, "--ranks" if options.ranks else "--all")

    result: VerifyResult | MatrixResult
    if options.all:
        from autopar.verify import verify_all

        result = verify_all(options.model, options.all, pins, dtype=options.dtype, steps=options.steps or 1)
    else:
        from autopar.verify import verify

        result = verify(options.model, options.ranks, pins, dtype=options.dtype, steps=options.steps or 3)
    print(json.dumps(result.to_data(), indent=2) if options.json else result.text())
    return 0 if result.passed else DIFFERS


def _dryrun(options: argparse.Namespace) -> int:
    from autopar.plan import Plan

    plan = Plan.load(options.plan)

    from autopar.dryrun import dry_run
    from autopar.models import resolve

    ranks = None if options.stages else options.rank or [0]
    result = dry_run(plan, resolve(options.model), ranks, optimizer=options.optimizer)
    print(json.dumps(result.to_data(), indent=2) if options.json else result.text(), end="\n" if options.json else "")
    return 0 if result.agrees else DIFFERS


def _calibrate(options: argparse.Namespace) -> int:
    _check_output(options.output)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if options.ranks is not None and launched:
        raise SpecError("torchrun has started the ranks already", where="--ranks", try_="without --ranks")

    from autopar.calibrate import calibrate, calibrate_locally, show_progress

    ranks = options.ranks
    found = calibrate(show_progress) if ranks is None else calibrate_locally(ranks, show_progress)
    if not launched or os.environ["RANK"] == "0":
        _write(found.toml(), options.output)
    return 0


def _write(text: str, path: str | None) -> None:
    if path is None:
        print(text, end="")
        return
    write_whole(text, path, "the cluster file")
    print(f"cluster file written to {path}")


def _report(options: argparse.Namespace) -> int:
    from autopar.plan import Plan
    from autopar.reports.text import WIDTH, render
    from autopar.specs import ClusterSpec

    plan = Plan.load(options.plan)
    cluster = ClusterSpec.parse(options.cluster) if options.cluster else None
    if cluster is not None and cluster.num_devices != plan.degrees.world_size:
        raise SpecError(
            f"{cluster.name} has {cluster.num_devices} devices, the plan is for {plan.degrees.world_size}",
            where="--cluster",
            try_="the cluster it was planned for",
        )
    if options.constants and cluster is None:
        raise SpecError("of which devices?", where="--constants", try_="--cluster, the one it was planned for")
    width = size_command.columns(WIDTH)
    _print(render(plan, cluster=cluster, width=width))
    if options.constants and cluster is not None:
        from autopar.reports.constants import constants_text

        _print("\n" + constants_text(cluster, width))
    return 0


def _print(report: str) -> None:
    """In what the output can hold: a report's rules are no ASCII."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        report.encode(encoding)
    except UnicodeEncodeError:
        report = report.replace("─", "-").encode(encoding, "replace").decode(encoding)
    print(report, end="")


def _check_ranks(ranks: int, where: str) -> None:
    """Processes share the cores and each holds the whole model beside its part: many more never finish."""
    cores = os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = max(1, min(max(8, RANKS_PER_CORE * cores), memory_bytes // RANK_BYTES))
    if ranks > most:
        raise SpecError(
            f"{ranks} processes are too many for the {cores} cores and {memory_bytes / 2**30:.0f} GiB here",
            where=where,
            try_=f"at most {most}; autopar dryrun checks plans for more",
        )


def _check_output(path: str | None) -> None:
    """Refuse now what would fail after the search."""
    if path is None:
        return
    parent = Path(path).absolute().parent
    if not parent.is_dir():
        raise SpecError(f"no folder {parent}", where="--output", try_="a folder that exists")
    if Path(path).is_dir():
        raise SpecError("is a folder", where=f"--output {path}", try_="a file name in it, plan.json")
    if not os.access(path if is_special(Path(path)) else Path(os.path.realpath(path)).parent, os.W_OK):
        raise SpecError("may not be written", where=f"--output {path}", try_="a folder of your own")


def _check_sequence(source: ModelSource, seq_len: int) -> None:
    if source.max_seq_len is not None and seq_len > source.max_seq_len:
        raise SpecError(
            f"{source.name} has learned positions for {source.max_seq_len} tokens, {seq_len} are asked for",
            where="--seq-len",
            try_=f"at most {source.max_seq_len}, or a config.json with a longer position table",
        )


RUNS: dict[str, Callable[[argparse.Namespace], int]] = {
    "plan": _plan,
    "size": _size,
    "verify": _verify,
    "dryrun": _dryrun,
    "calibrate": _calibrate,
    "report": _report,
}


if __name__ == "__main__":
    sys.exit(main())
