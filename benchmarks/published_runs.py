"""Predict published training runs and compare: step time, order of layouts, peak memory.

    python benchmarks/published_runs.py --data runs.jsonl
    python benchmarks/published_runs.py --data runs.jsonl --json --leave-one-source-out

Each row's block is captured through the real tracer, laid out by the row's plan and priced by the cost model of the
search with the constants in cost_model/constants/. A row that cannot be priced is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fit_constants import cross_validate
from published_rows import read_rows
from row_prices import Prepared, memory, prepare_rows, price
from scoring import Priced, memory_scores, ordering_scores, time_scores

from autopar.cost_model.constant_table import Constants, load_constants
from autopar.errors import AutoparError


def priced_rows(prepared: Sequence[Prepared], constants: Constants) -> list[Priced]:
    return [Priced(p.run, price(p, constants), memory(p, constants)) for p in prepared]


def report(prepared: Sequence[Prepared], refused: dict[str, str], cross: bool) -> dict[str, Any]:
    """Everything the command says, as plain data."""
    constants = load_constants()
    priced = priced_rows(prepared, constants)
    found = time_scores(priced)
    found["ordering"] = ordering_scores(priced)
    found["memory"] = memory_scores(priced)
    found["not_priced"] = refused
    found["assumed"] = {p.run.id: list(p.run.assumed) for p in prepared if p.run.assumed}
    if cross:
        held_out: list[Priced] = []
        for source, fitted in cross_validate(prepared, constants).items():
            held_out += priced_rows([p for p in prepared if p.run.source == source], fitted)
        found["leave_one_source_out"] = time_scores(held_out)
        shared = _shared(prepared)
        kept = [p for p in held_out if p.run.id in shared]
        found["leave_one_source_out"]["where_shared"] = time_scores(kept)["overall"] if kept else {}
    return found


def _shared(prepared: Sequence[Prepared]) -> set[str]:
    """Rows whose device generation and precision occur in some other source as well: the others cannot be predicted
    by constants fitted elsewhere, and are reported apart."""
    sources: dict[tuple[str, str], set[str]] = {}
    for p in prepared:
        sources.setdefault((p.generation, str(p.run.layout.fp8)), set()).add(p.run.source)
    return {p.run.id for p in prepared if len(sources[p.generation, str(p.run.layout.fp8)]) > 1}


def print_report(found: dict[str, Any], priced: Sequence[Priced], worst: int) -> None:
    _print_times("step time", found)
    if "leave_one_source_out" in found:
        _print_times("leave one source out", found["leave_one_source_out"])
        shared = found["leave_one_source_out"]["where_shared"]
        if shared:
            print(f"  where others share device and precision: {shared['n']}, {shared['mean_abs_error']:.1%} mean")
    print("\norder of layouts            pairs  ordered  groups  median regret")
    for source, score in found["ordering"].items():
        regret = f"{score['median_regret']:13.1%}" if "median_regret" in score else ""
        print(f"  {source:24} {score['pairs']:6} {score['ordered']:8.1%} {score.get('groups', 0):7} {regret}")
    print("\npeak memory                     n    mean   median    bias")
    for kind, score in found["memory"].items():
        if kind != "oom":
            errors = f"{score['mean_abs_error']:7.1%} {score['median_abs_error']:8.1%} {score['bias']:+7.1%}"
            print(f"  {kind:24} {score['n']:6} {errors}")
    for row in found["memory"]["oom"]:
        said = "fits (wrong)" if row["fits"] else "does not fit"
        sizes = f"{row['predicted_gib']:.1f} of {row['device_gib']:.1f} GiB"
        print(f"  {row['id']} ran out of memory: predicted {sizes}, {said}")
    print(f"\nworst {worst} rows" if worst else "")
    timed = [p for p in priced if p.run.step_s is not None]
    for p in sorted(timed, key=lambda p: -abs(p.error))[:worst]:
        parts = "  ".join(
            f"{k} {v / p.parts['total']:.0%}"
            for k, v in p.parts.items()
            if k != "total" and v > 0.005 * p.parts["total"]
        )
        print(f"  {p.run.id:30} {p.error:+7.1%}  {p.run.step_s:9.4g} s  {parts}")
    for row, reason in found["not_priced"].items():
        print(f"  not priced: {row}: {reason}")
    for text, count in Counter(text for texts in found["assumed"].values() for text in texts).items():
        print(f"  assumed: {text} ({count} rows)")


def _print_times(title: str, scores: dict[str, Any]) -> None:
    print(f"\n{title:31} n    mean   median     p90    bias")
    for source, s in [*scores["by_source"].items(), ("overall", scores["overall"])]:
        if not s:
            continue
        errors = f"{s['mean_abs_error']:7.1%} {s['median_abs_error']:8.1%} {s['p90_abs_error']:7.1%} {s['bias']:+7.1%}"
        print(f"  {source:24} {s['n']:6} {errors}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="published runs, JSON lines")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--source", help="score only this source")
    parser.add_argument("--worst", type=int, default=20, help="how many of the worst rows to print")
    parser.add_argument(
        "--leave-one-source-out", action="store_true", help="score each source with constants refitted without it"
    )
    arguments = parser.parse_args()
    started = time.perf_counter()
    try:
        rows = read_rows(arguments.data)
    except (OSError, AutoparError) as error:
        parser.error(str(error))
    if arguments.source and not arguments.leave_one_source_out:
        rows = [row for row in rows if row.get("source_id") == arguments.source]
        if not rows:
            parser.error(f"no row of source {arguments.source}")
    prepared, refused = prepare_rows(rows, workers=2)
    found = report(prepared, refused, arguments.leave_one_source_out)
    found["seconds"] = time.perf_counter() - started
    if arguments.json:
        json.dump(found, sys.stdout, indent=2)
        print()
    else:
        print_report(found, priced_rows(prepared, load_constants()), arguments.worst)
        print(f"{len(rows)} rows in {found['seconds']:.0f} s")


if __name__ == "__main__":
    main()
