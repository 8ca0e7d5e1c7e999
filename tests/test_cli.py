"""The command line: exit codes, one line for each user error, nothing written on failure, JSON as documented."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autopar
from autopar import cli
from autopar.mesh import Degrees
from autopar.plan import Plan

PLAN = Plan(
    degrees=Degrees(dp=2, tp=2),
    global_batch=8,
    seq_len=16,
    micro_batch=2,
    stages=(("model.layers.0-3",),),
    prediction={
        "step_time_s": 1.0,
        "time_s": {"forward": 1.0},
        "peak_memory_bytes": [{"parameters": 1024, "total": 1024}],
    },
)
COUNTS = {"variables": 12, "constraints": 8, "candidates": 6, "pruned": 4, "solved": 2}
STATISTICS = {"solver": "highs", "status": "incumbent", "gap": 0.125, "bound_s": 0.5, **COUNTS,
              "capture_s": 0.25, "search_s": 0.5}  # fmt: skip
ARGUMENTS = ["plan", "--model", "llama-tiny", "--cluster", "local:4", "--global-batch", "8", "--seq-len", "16"]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that has already found PLAN, so that these tests are about the command line alone."""
    result = SimpleNamespace(plan=PLAN, alternatives=(), statistics=STATISTICS, notices=())
    monkeypatch.setattr(cli, "_search", lambda *specs: result)


@pytest.mark.usefixtures("found")
def test_plan_prints_the_report_and_saves_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert cli.main([*ARGUMENTS, "-o", str(path)]) == 0
    assert Plan.load(path) == PLAN
    out = capsys.readouterr().out
    assert "pp 1 x dp 2 x cp 1 x tp 2" in out
    assert "capture 0.2 s, search 0.5 s" in out
    assert f"plan written to {path}" in out


@pytest.mark.usefixtures("found")
def test_plan_json_is_the_only_output_and_holds_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ARGUMENTS, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert sorted(data) == sorted([*STATISTICS, "plan", "prediction"])
    assert {key: data[key] for key in STATISTICS} == pytest.approx(STATISTICS)
    assert Plan.loads(json.dumps(data["plan"])) == PLAN
    assert data["prediction"]["step_time_s"] == 1.0


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--solver", "cplex"], "search.solver: 'cplex' is not one of highs, cbc, heuristic"),
     (["--time-limit", "soon"], '--time-limit: must be a duration such as "90s"'),
     (["--time-limit", "0s"], "--time-limit: must be a duration")],
)  # fmt: skip
@pytest.mark.usefixtures("found")
def test_plan_refuses_a_search_it_cannot_make(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*ARGUMENTS, *options]) == 2
    assert text in capsys.readouterr().err


def changed(**options: str) -> list[str]:
    """ARGUMENTS with some options replaced or added."""
    arguments = list(ARGUMENTS)
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if flag in arguments:
            arguments[arguments.index(flag) + 1] = value
        else:
            arguments += [flag, value]
    return arguments


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "lama3-8b"}, "did you mean 'llama3-8b'"),
        ({"cluster": "dgx-h10:2"}, "did you mean 'dgx-h100'"),
        ({"cluster": "none.toml"}, "cannot read the cluster file"),
        ({"pin": "tpp=2"}, "did you mean 'tp'"),
        ({"pin": "tp=3"}, "tp 3 does not divide the 4 devices"),
        ({"pin": "microbatch=3"}, "microbatch 3 does not divide the global batch of 8 sequences"),
        ({"global_batch": "0"}, "train.global_batch: must be a positive integer, not 0"),
        ({"precision": "fp12"}, "train.precision: 'fp12' is not one of"),
        ({"model": "gpt2", "seq_len": "2048"}, "gpt2 has learned positions for 1024 tokens, 2048 are asked for"),
        ({"output": "{tmp}/none/plan.json"}, "no folder"),
        ({"output": "{tmp}"}, "is a folder"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, str], says: str
) -> None:
    target = tmp_path / "plan.json"
    options = {key: value.format(tmp=tmp_path) for key, value in options.items()}
    assert cli.main(changed(**{"output": str(target), **options})) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert err.startswith("autopar: error: ")
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_wrong_options_are_argparse_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["plan"], [*ARGUMENTS, "--batch", "8"], changed(global_batch="many"), []):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2
        assert "autopar" in capsys.readouterr().err


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_verify_exits_by_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], passed: bool, code: int
) -> None:
    calls: list[Any] = []

    def verify(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options))
        return SimpleNamespace(passed=passed, to_data=lambda: {"loss_error": 0.5}, text=lambda: "loss 0.5")

    monkeypatch.setitem(sys.modules, "autopar.verify", SimpleNamespace(verify=verify))
    arguments = ["verify", "--model", "llama-tiny", "--ranks", "4", "--pin", "tp=2"]
    assert cli.main(arguments) == code
    assert capsys.readouterr().out == "loss 0.5\n"
    assert cli.main([*arguments, "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {"loss_error": 0.5}
    (model, ranks, pins), options = calls[0]
    assert (model, ranks, pins.tp, options) == ("llama-tiny", 4, 2, {"dtype": "float64", "steps": 3})


@pytest.mark.parametrize("option", ["--ranks", "--steps"])
def test_verify_refuses_counts_below_one(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert cli.main(["verify", "--model", "llama-tiny", "--ranks", "1", option, "0"]) == 2
    assert f"{option}: must be a positive integer" in capsys.readouterr().err


def test_report_reads_a_saved_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert cli.main(["report", str(tmp_path / "plan.json"), "--cluster", "local:4"]) == 0
    assert PLAN.fingerprint in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path / "none.json")]) == 2


@pytest.mark.parametrize("command", list(cli.RUNS))
def test_every_command_prints_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A percent sign in an option's help is a format, and took `autopar plan --help` down."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert f"autopar {command}" in capsys.readouterr().out


def test_help_needs_no_torch() -> None:
    code = "import sys; from autopar.cli import RUNS, parser; parser(RUNS).format_help(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "autopar", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"autopar {autopar.__version__}\n"


def test_an_unexpected_error_is_one_line_and_traceback_shows_it_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class RemoteError(Exception):
        pass

    def verify(*arguments: Any, **options: Any) -> Any:
        raise IndexError("out of range\nand more") from RemoteError('--- rank 1 ---\n  File "/home/me/net.py", line 7')

    monkeypatch.setitem(sys.modules, "autopar.verify", SimpleNamespace(verify=verify))
    arguments = ["verify", "--model", "llama-tiny", "--ranks", "2"]
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("autopar: error: IndexError: out of range (")
    assert err.count("\n") == 1
    assert "--traceback" in err
    assert cli.main([*arguments, "--traceback"]) == 2
    err = capsys.readouterr().err
    assert "--- rank 1 ---" in err
    assert err.splitlines()[-1].startswith("autopar: error: IndexError: out of range (")


def test_an_interrupt_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "autopar.verify", SimpleNamespace(verify=verify))
    with pytest.raises(KeyboardInterrupt):
        cli.main(["verify", "--model", "llama-tiny", "--ranks", "2"])


def test_more_processes_than_a_machine_can_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--model", "llama-tiny", "--ranks", "100000"]) == 2
    assert "at most" in capsys.readouterr().err


def test_report_refuses_a_cluster_of_another_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert cli.main(["report", str(tmp_path / "plan.json"), "--cluster", "local:4"]) == 0
    assert cli.main(["report", str(tmp_path / "plan.json"), "--cluster", "local:8"]) == 2
    assert "local:8 has 8 devices, the plan is for 4" in capsys.readouterr().err


def test_a_report_prints_constants_of_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PLAN.save(tmp_path / "plan.json")
    command = ["report", str(tmp_path / "plan.json"), "--constants"]
    assert cli.main([*command, "--cluster", "local:4"]) == 0
    assert "step_overhead_s" in capsys.readouterr().out
    assert cli.main(command) == 2
    assert "--constants: of which devices?" in capsys.readouterr().err


def test_a_report_goes_where_ascii_is_all_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PLAN.save(tmp_path / "plan.json")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["report", str(tmp_path / "plan.json")]) == 0
    assert b"-----" in written.getvalue()


def test_a_reader_that_has_seen_enough_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    PLAN.save(tmp_path / "plan.json")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["report", str(tmp_path / "plan.json")]) == 141
    assert capsys.readouterr().err == ""
