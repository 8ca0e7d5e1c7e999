"""The options of every command, and their help texts. What a command does stands in `cli`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from autopar import __version__, size_command

__all__ = ["parser"]


def parser(runs: Mapping[str, Callable[[argparse.Namespace], int]]) -> argparse.ArgumentParser:
    """The parser of the whole command line; what a command's name maps to stands in `options.run`."""
    parser = argparse.ArgumentParser(prog="autopar", description="A declarative auto-parallel compiler for PyTorch.")
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_plan, _add_size, _add_verify, _add_dryrun, _add_calibrate, _add_report):
        add(commands)
    for name, command in commands.choices.items():
        command.set_defaults(run=runs[name])
        command.add_argument("--traceback", action="store_true", help="on an error, print where it came from first")
    return parser


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser("plan", help="search the best parallel plan for a model on a cluster")
    _add_model(plan)
    plan.add_argument("--cluster", required=True, help="dgx-h100:32, local:4 or a cluster file (TOML)")
    plan.add_argument("--global-batch", required=True, type=int, metavar="N", help="sequences per optimizer step")
    plan.add_argument("--seq-len", required=True, type=int, metavar="S", help="tokens per sequence")
    plan.add_argument("--precision", help="fp32, bf16-mixed, ...; default: the device's")
    plan.add_argument("--optimizer", default="adamw", help="adamw (default), adam or sgd")
    _add_pins(plan)
    _add_search(plan)
    plan.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON")
    plan.add_argument("--json", action="store_true", help="print JSON instead of the report")


def _add_size(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    size = commands.add_parser("size", help="find the smallest or cheapest cluster that trains a model in time")
    _add_model(size)
    size_command.add_options(size)
    _add_pins(size)
    size.add_argument("-o", "--output", metavar="FILE", help="write the plan of the best size as JSON")
    size.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = commands.add_parser("verify", help="compare a parallel run with one process, parameter by parameter")
    _add_model(verify)
    count = verify.add_mutually_exclusive_group(required=True)
    count.add_argument("--ranks", type=int, metavar="N", help="local processes to start")
    count.add_argument(
        "--all", type=int, metavar="N", help="every layout for N processes that has the pins, in a table"
    )
    _add_pins(verify)
    verify.add_argument("--dtype", default="float64", choices=("float64", "float32", "bfloat16"))
    verify.add_argument("--steps", type=int, help="SGD steps, then as many AdamW steps (default 3, with --all 1)")
    verify.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_dryrun(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    dryrun = commands.add_parser("dryrun", help="run ranks of a plan without a cluster and compare with the prediction")
    dryrun.add_argument("plan", help="a plan file")
    _add_model(dryrun)
    which = dryrun.add_mutually_exclusive_group()
    which.add_argument(
        "--rank", type=int, action="append", metavar="R", help="a rank to run (default 0); may be repeated"
    )
    which.add_argument("--stages", choices=("all",), help="run the first rank of every pipeline stage")
    dryrun.add_argument("--optimizer", default="adamw", choices=("adamw", "adam", "sgd"), help="whose state is held")
    dryrun.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    calibrate = commands.add_parser("calibrate", help="measure this machine and write a cluster file")
    calibrate.add_argument("--ranks", type=int, metavar="N", help="local processes to start, unless torchrun did")
    calibrate.add_argument("-o", "--output", metavar="FILE", help="write the cluster file here instead of printing it")


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser("report", help="print the report of a saved plan")
    report.add_argument("plan", help="a plan file")
    report.add_argument("--cluster", help="compare memory with this cluster's devices")
    report.add_argument("--constants", action="store_true", help="with --cluster: the constants behind its prices")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", required=True, help="a preset (llama3-8b, gpt2, ...), hf:PATH of a config.json, or py:module:factory"
    )


def _add_pins(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="K=V",
        help="fix a choice: dp cp tp sp pp microbatch schedule virtual_stages zero zero_group checkpoint "
        "checkpoint_segment context_parallel, or a module's placement",
    )


def _add_search(command: argparse.ArgumentParser) -> None:
    command.add_argument("--objective", default="step-time", help="step-time (default), memory, or cost (per token)")
    command.add_argument("--price", type=float, metavar="P", help="money per device and hour")
    command.add_argument("--memory-headroom", type=float, default=0.0, metavar="F", help="fraction of memory kept free")
    command.add_argument("--solver", default="highs", help="highs (default), cbc or heuristic; the others step in")
    command.add_argument("--time-limit", metavar="T", help="after so long (30s, 5m), take the best plan so far")
    command.add_argument("--keep", metavar="PLAN", help="a plan in use: it stays unless another is 1 %% faster")
