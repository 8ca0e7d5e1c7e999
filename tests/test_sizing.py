"""Sizing: the smallest and cheapest count over searches that are made up, then over one that is not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopar import cli, sizing
from autopar.errors import InfeasiblePlanError, SpecError
from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.sizing import Job, Sizing, counts_of, offer_of, size
from autopar.specs import ClusterSpec, Pins, TrainSpec

DAY_S = 86400.0
H100 = offer_of("h100")
FLOPS, PARAMETERS, TOKENS, BATCH_TOKENS = 989.4e12, 10**10, 1e12, 2**22


def step_of(devices: int, mfu: float) -> float:
    return 6 * PARAMETERS * BATCH_TOKENS / (devices * FLOPS * mfu)


def odd_part(n: int) -> int:
    return n // (n & -n)


def searched(step_s: Callable[[int], float]) -> Callable[[ClusterSpec], Any]:
    """A search whose step time is `step_s(devices)`; NaN lacks memory, infinity has no degrees."""

    def plan_for(cluster: ClusterSpec) -> Any:
        seconds = step_s(cluster.num_devices)
        if math.isnan(seconds):
            raise InfeasiblePlanError("lacks 3 GiB on stage 0", where="memory")
        if math.isinf(seconds):
            raise InfeasiblePlanError(f"no degrees factor {cluster.num_devices} devices", where="degrees")
        plan = Plan(
            degrees=Degrees(dp=cluster.num_devices), global_batch=cluster.num_devices, seq_len=8, micro_batch=1,
            stages=(("layers.0-1",),),
            prediction={"step_time_s": seconds, "mfu": 0.4, "peak_memory_bytes": [{"total": 2**30}]},
        )  # fmt: skip
        return SimpleNamespace(plan=plan)

    return plan_for


def sized(step_s: Callable[[int], float], days: float = 30, **job: Any) -> Sizing:
    wanted = Job(tokens=TOKENS, tokens_per_step=BATCH_TOKENS, deadline_s=days * DAY_S, **job)
    return size(H100, wanted, PARAMETERS, searched(step_s))


def smallest_by_brute_force(step_s: Callable[[int], float], days: float) -> int:
    steps = math.ceil(TOKENS / BATCH_TOKENS)
    return next(n for n in counts_of(H100) if steps * step_s(n) <= days * DAY_S)


@pytest.mark.parametrize("days", [1, 7, 30, 200, 2000, 50000])
@pytest.mark.parametrize(
    "step_s",
    [
        lambda n: step_of(n, 0.4),
        lambda n: step_of(n, 0.4) + 0.05,  # something that no device takes off
        lambda n: step_of(n, 0.15 if n % 48 == 0 or n % 40 == 0 else 0.4),  # counts that factor badly
        lambda n: math.nan if n < 64 else step_of(n, 0.3 if n < 256 else 0.45),  # memory, then no recomputation
        lambda n: math.inf if odd_part(n) in (5, 9, 15) else step_of(n, 0.4) + 0.2,  # a batch of a power of two
    ],
    ids=["ideal", "overhead", "uneven", "memory", "holes"],
)
def test_the_smallest_count_is_found(step_s: Callable[[int], float], days: float) -> None:
    found = sized(step_s, days)
    assert found.smallest is not None
    assert found.smallest.devices == smallest_by_brute_force(step_s, days)
    assert sum(not math.isinf(step_s(s.devices)) for s in found.sizes) <= 24
    assert found.smallest.train_s <= days * DAY_S


def test_counts_that_were_left_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sized(lambda n: step_of(n, 0.4), days=200).left_from is None
    monkeypatch.setattr(sizing, "MOST_SEARCHES", 2)
    found = sized(lambda n: step_of(n, 0.4), days=200)
    assert found.smallest is not None
    assert (found.smallest.devices, found.left_from) == (16, 8)


def test_more_memory_can_be_cheaper() -> None:
    """From 96 devices on nothing is recomputed: 1.5 times as many devices take half the time."""
    found = sized(lambda n: step_of(n, 0.45 if n >= 96 else 0.3), days=34, price=2.0)
    assert found.smallest is not None
    assert found.cheapest is not None
    assert found.smallest.devices < 96 <= found.cheapest.devices
    assert found.cheapest.cost == pytest.approx(found.cheapest.devices * found.cheapest.train_s / 3600 * 2)
    assert found.smallest.cost is not None
    assert found.cheapest.cost < found.smallest.cost


def test_time_that_does_not_train_is_paid_too() -> None:
    whole, part = sized(lambda n: step_of(n, 0.4)), sized(lambda n: step_of(n, 0.4), useful=0.5)
    assert whole.smallest is not None
    assert part.smallest is not None
    assert part.smallest.devices == pytest.approx(2 * whole.smallest.devices, rel=0.15)


def test_a_deadline_that_no_count_meets_says_what_would() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"takes 2.76 days. Try: at least 2.76d, or a larger --global-batch"):
        sized(lambda n: max(1.0, step_of(n, 0.4)), days=2)
    with pytest.raises(InfeasiblePlanError, match="no plan with .* devices or fewer: lacks 3 GiB"):
        sized(lambda n: math.nan)

    def step_s(n: int) -> float:
        return max(1.001, step_of(n, 0.4))  # 2.762 days

    with pytest.raises(InfeasiblePlanError, match=r"at least 2.77d"):
        sized(step_s, days=2)
    assert sized(step_s, days=2.77).smallest is not None


def test_counts_that_the_pins_do_not_go_with_are_passed_over() -> None:
    pins, train = Pins(tp=2, dp=3), TrainSpec(global_batch=48, seq_len=8)

    def check(cluster: ClusterSpec) -> None:
        pins.check(cluster, train)

    job = Job(tokens=TOKENS, tokens_per_step=BATCH_TOKENS, deadline_s=400 * DAY_S)
    found = size(H100, job, PARAMETERS, searched(lambda n: step_of(n, 0.4)), check=check)
    assert found.smallest is not None
    assert found.smallest.devices == min(n for n in counts_of(H100) if n % 6 == 0)
    table = size(H100, job, PARAMETERS, searched(lambda n: step_of(n, 0.4)), [8, 24], check)
    assert [s.plan is not None for s in table.sizes] == [False, True]
    assert table.sizes[0].reason == "dp 3 x tp 2 = 6 does not divide the 8 devices"
    with pytest.raises(SpecError, match="dp 3 x tp 2"):
        size(H100, job, PARAMETERS, searched(lambda n: step_of(n, 0.4)), [8, 16], check)


def test_counts_that_are_asked_for() -> None:
    """Field case pe-04: a table over 8, 16, 32 and 64 devices."""
    job = Job(tokens=None, tokens_per_step=BATCH_TOKENS, price=1.0)
    found = size(H100, job, PARAMETERS, searched(lambda n: step_of(n, 0.4)), [8, 64, 32, 16])
    assert [s.devices for s in found.sizes] == [8, 16, 32, 64]
    assert found.smallest is found.sizes[0]
    assert all(s.headroom_bytes > 0 for s in found.sizes)


def test_a_cluster_file_grows_by_its_last_link(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text(
        '[device]\nkind = "h100"\n[[link]]\nspan = 2\nbandwidth = "900GB/s"\nlatency = "1us"\n'
        '[[link]]\nspan = 4\nbandwidth = "450GB/s"\nlatency = "2us"\n'
        '[[link]]\nspan = 8\nbandwidth = "50GB/s"\nlatency = "5us"\n'
    )
    offer = offer_of(str(path))
    assert offer.devices_per_node == 4
    assert [[link.span for link in offer.cluster(n).links] for n in (1, 2, 4, 12)] == [[], [2], [2, 4], [2, 4, 12]]
    assert [link.span for link in offer_of("a100-80g").cluster(4).links] == [4]


@pytest.mark.parametrize(
    ("values", "text"),
    [({"tokens": 0.0}, "--tokens"), ({"tokens": math.nan}, "--tokens"), ({"price": -1.0}, "--price"),
     ({"deadline_s": math.inf}, "--deadline"), ({"useful": 1.5}, "--useful"), ({"useful": 0.0}, "--useful")],
)  # fmt: skip
def test_bad_numbers_are_refused_by_name(values: dict[str, float], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        Job(**{"tokens": 1e9, "tokens_per_step": 1024, **values})  # type: ignore[arg-type]


TINY = ["size", "--model", "gpt-tiny", "--device", "a100-80g", "--global-batch", "64"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "--tokens and --deadline are needed"),
        (["--counts", "8", "--seq-len", "0"], "--seq-len: must be a positive integer"),
        (["--counts", "8", "--global-batch", "0"], "--global-batch: must be a positive integer"),
        (["--counts", "9999999999"], "Try: at most 1048576"),
        (["--tokens", "1e9"], "--tokens and --deadline are needed"),
        (["--tokens", "many", "--deadline", "3d"], '--tokens: must be a count such as "15T"'),
        (["--tokens", "1e9", "--deadline", "0d"], "--deadline: must be a duration"),
        (["--tokens", "1e9", "--deadline=-3d"], "--deadline: must be a duration"),
        (["--counts", "8,x"], "--counts: 'x' is no count of devices"),
        (["--counts", "0"], "--counts: '0' is no count"),
        (["--counts", "12"], "12 devices are no whole number of nodes of 8. Try: 16"),
        (["--counts", "8", "--price", "-2"], "--price: must be a positive number"),
        (["--counts", "8", "--price", "nan"], "--price: must be a positive number"),
        (["--counts", "8", "--useful", "2"], "--useful: must be a fraction"),
        (["--counts", "8", "--seq-len", "100000"], "--seq-len: gpt-tiny has learned positions for 256 tokens"),
        (["--counts", "8", "-o", "/no/such/folder/plan.json"], "no folder /no/such/folder"),
        (["--counts", "8", "--device", "h1000"], "unknown device 'h1000'. Try: did you mean 'h100'?"),
        (["--counts", "8", "--device", "gb200"], "no node preset holds gb200"),
    ],
)
def test_the_command_refuses_bad_input(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TINY, *options]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_the_command_prints_a_table_and_writes_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real searches of a tiny model over counts within and beyond a node."""
    path = tmp_path / "plan.json"
    options = ["--counts", "1,4,16", "--tokens", "1e9", "--deadline", "1000d", "--price", "2"]
    assert cli.main([*TINY, *options, "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert "gpt-tiny on dgx-a100-80g, 64 x 256 tokens a step, 1e+09 tokens within 1000 days" in out
    assert "smallest" in out
    assert "cheapest" in out
    assert f"written to {path}" in out
    assert Plan.load(path).global_batch == 64
    assert cli.main([*TINY, *options, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["devices"] for row in data["sizes"]] == [1, 4, 16]
    one = data["sizes"][0]
    steps = math.ceil(1e9 / (64 * 256))
    assert one["train_s"] == pytest.approx(steps * one["step_time_s"])
    assert one["cost"] == pytest.approx(one["train_s"] / 3600 * 2)
    assert one["cost_per_million_tokens"] == pytest.approx(one["cost"] / 1e9 * 1e6, rel=1e-4)
    assert (data["smallest"], data["price"]) == (1, 2.0)
