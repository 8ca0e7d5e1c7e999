"""The report: golden texts of a priced plan and of a hand-written one, and what each section must not hide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.reports.quantities import bytes_text, count_text, seconds_text
from autopar.reports.text import render
from autopar.size_command import columns
from autopar.specs import ClusterSpec

GIB = 2**30
STAGE = {
    "parameters": 4 * GIB,
    "gradients": 4 * GIB,
    "optimizer": 24 * GIB,
    "activations": 10 * GIB,
    "logits": 0,
    "communication": GIB,
    "reserved": 4 * GIB,
    "total": 47 * GIB,
}
LAST = {**STAGE, "logits": 3 * GIB, "total": 50 * GIB}
HAND_WRITTEN = Plan(
    degrees=Degrees(tp=2, pp=2),
    global_batch=8,
    seq_len=128,
    micro_batch=2,
    stages=(("model.layers.0-1",), ("model.layers.2-3",)),
    parameters={"model.layers.*.mlp.up_proj.weight": "S(0)", "transformer.h.*.attn.c_attn.weight": "S(1,left=3)"},
)
PRICED = Plan(
    degrees=Degrees(dp=2, tp=2, pp=4),
    global_batch=64,
    seq_len=4096,
    micro_batch=1,
    stages=(("model.layers.0-7",), ("model.layers.8-15",), ("model.layers.16-23",), ("model.layers.24-31",)),
    sequence_sharding=True,
    parameters={"model.layers.*.self_attn.q_proj.weight": "S(0)", "model.layers.*.self_attn.o_proj.weight": "S(1)"},
    checkpoint={"model.layers.0-15": "full"},
    precision="bf16-mixed",
    overlap=("dp_reduce",),
    prediction={
        "step_time_s": 2.0,
        "tokens_per_s_per_device": 8192.0,
        "mfu": 0.431,
        "time_s": {
            "forward": 0.5,
            "backward": 1.0,
            "recompute": 0.1,
            "tp_communication": 0.15,
            "cp_communication": 0.0,
            "dp_communication": 0.05,
            "pp_communication": 0.01,
            "bubble": 0.17,
            "optimizer": 0.02,
        },
        "peak_memory_bytes": [STAGE, STAGE, STAGE, LAST],
        "collectives": [{"kind": "all_gather", "axis": "tp", "bytes": 64 * 2**20, "count": 4096}],
    },
    solver={"status": "optimal"},
)
RESULT = SimpleNamespace(
    alternatives=(
        SimpleNamespace(
            degrees=Degrees(dp=4, tp=2, pp=2),
            sp=True,
            micro_batch=1,
            schedule="1f1b",
            checkpoint="full",
            step_time_s=2.2,
            time_s={"forward": 1.65, "bubble": 0.55},
            reason="recompute costs 0.3 s more than the bubble it saves",
        ),
        SimpleNamespace(
            degrees=Degrees(dp=16),
            sp=False,
            micro_batch=1,
            schedule="1f1b",
            checkpoint="full",
            step_time_s=None,
            time_s={},
            reason="stage 0 lacks 31 GiB",
        ),
    ),
    statistics={"variables": 2310, "candidates": 184, "pruned": 170, "search_s": 1.234, "bound": 2.0, "gap": 0.0},
)


def test_priced_plan(golden: Callable[[str, str], None]) -> None:
    cluster = ClusterSpec.preset("dgx-h100", nodes=2)
    golden("report_priced", render(PRICED, RESULT, cluster=cluster, model="llama3-8b", notices=["a notice"]))


def test_hand_written_plan_reports_without_a_price(golden: Callable[[str, str], None]) -> None:
    golden("report_hand_written", render(HAND_WRITTEN))


def test_a_saved_plan_reports_the_same_prices() -> None:
    loaded = Plan.loads(PRICED.dumps())
    assert render(loaded) == render(PRICED)
    assert "8,192" in render(loaded)
    assert "43.1 %" in render(loaded)


def test_times_of_the_parts_are_shown_with_their_share() -> None:
    lines = [line.strip() for line in render(PRICED).splitlines()]
    bubble = next(line for line in lines if line.startswith("pipeline bubble"))
    assert bubble.split() == ["pipeline", "bubble", "170", "ms", "8.5", "%"]
    assert not any(line.startswith("context-parallel") for line in lines)


def test_the_last_stage_keeps_its_own_memory_row() -> None:
    lines = render(PRICED, cluster=ClusterSpec.preset("dgx-h100")).splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["stage", "weights"])
    first, last = (line.split() for line in lines[start + 2 : start + 4])
    assert first[0] == "0-2"
    assert first[-4:] == ["47", "GiB", "59.0", "%"]
    assert last[0] == "3"
    assert last[-4:] == ["50", "GiB", "62.8", "%"]


def test_every_line_fits_the_width() -> None:
    for width in (80, 110):
        assert max(map(len, render(PRICED, RESULT, width=width).splitlines())) <= width


def test_interleaved_stages_name_the_ranks_that_hold_them() -> None:
    plan = HAND_WRITTEN.replace(
        stages=tuple((f"model.layers.{i}",) for i in range(4)), virtual_stages=2, schedule="interleaved"
    )
    rows = [line.split() for line in render(plan).splitlines() if "model.layers." in line and "mlp" not in line]
    assert [row[-1] for row in rows] == ["0-1", "2-3", "0-1", "2-3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(80 * GIB), "80 GiB"),
        (bytes_text(1536), "1.5 KiB"),
        (bytes_text(1023.9 * 2**20), "1 GiB"),
        (seconds_text(0), "0 s"),
        (seconds_text(0.0123), "12.3 ms"),
        (seconds_text(0.99996), "1 s"),
        (seconds_text(2e-6), "2 us"),
        (seconds_text(123.456), "123 s"),
        (count_text(553_562), "554k"),
    ],
)
def test_quantities(text: str, expected: str) -> None:
    assert text == expected


def test_stages_of_one_rank_share_its_memory_and_segments_are_told() -> None:
    stages = tuple((f"model.layers.{8 * i}-{8 * i + 7}",) for i in range(4))
    plan = PRICED.replace(
        degrees=replace(PRICED.degrees, pp=2), stages=stages, schedule="interleaved", virtual_stages=2,
        checkpoint_segment=4,
    )  # fmt: skip
    text = render(plan)
    memory = text[text.index("Memory at the peak") : text.index("Layers")]
    assert [line.split()[0] for line in memory.splitlines()[4:] if line] == ["0-1"]
    assert "full, 4 layers at a time on 16 of 32 layers" in " ".join(text.split())


def test_eighty_columns_hold_the_report_unbroken() -> None:
    cluster = ClusterSpec.preset("dgx-h100", nodes=2)
    text = render(PRICED, RESULT, cluster=cluster, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "activations  10 GiB  10 GiB\n" in text
    assert "2   4   1   2   on   1      1f1b      2.2 s  +10.0 %" in text


@pytest.mark.parametrize(("terminal", "wide"), [(True, 93), (False, 110)])
def test_only_a_terminal_is_asked_for_its_width(terminal: bool, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "93")
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: terminal))
    assert columns(110) == wide
