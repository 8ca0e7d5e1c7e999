"""Measurements to a cluster file: the fit finds the figures that samples were made from, the file loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from autopar import cli
from autopar.calibrate import Calibration, _level_sizes, fit, group_sizes
from autopar.cost_model.comm_cost import GroupCost, group_cost
from autopar.links import COLLECTIVES
from autopar.mesh import Degrees
from autopar.runtime import collectives
from autopar.runtime import measure as measure_module
from autopar.runtime.measure import Sample, _collectives, measure, measurement_count, send_partner
from autopar.specs import ClusterSpec

CPU = torch.device("cpu")


def samples(*groups: tuple[int, float, float]) -> list[Sample]:
    """A machine of 100 Gflop/s in fp32 whose small products reach half of it; groups: (ranks, bytes/s, latency)."""
    made = [
        Sample("matmul", "fp32", 1e9, 1e-2),
        Sample("matmul", "fp32", 1e6, 2e-5),
        Sample("matmul", "fp32", 1e8, 2e-3),
    ]
    made += [Sample("matmul", "fp64", 1e9, 2e-2)]
    made += [
        Sample("attention", "fp32", 1e8, 4e-3),
        Sample("memory", "fp32", 6e7, 1e-2),
        Sample("launch", "fp32", 50, 1e-4),
    ]
    for ranks, bandwidth, latency_s in groups:
        cost = GroupCost(ranks, bandwidth, latency_s)
        for kind in COLLECTIVES:
            made += [Sample(kind, "fp32", n, cost.seconds(kind, n), ranks) for n in (1e3, 1e5, 1e7)]
    return made


def test_rates_and_efficiencies() -> None:
    found = fit(samples(), CPU, 1, ())
    assert found.flops == {"fp32": pytest.approx(1e11), "fp64": pytest.approx(5e10)}
    assert found.matmul_efficiency == pytest.approx(0.75)  # of 1, 0.5, 0.5 and 1
    assert found.attention_efficiency == pytest.approx(0.25)
    assert found.memory_bandwidth == pytest.approx(6e9)
    assert found.launch_s == pytest.approx(2e-6)
    assert found.levels == ()


@pytest.mark.parametrize("ranks", [2, 3])
def test_latency_and_bandwidth_of_exact_samples(ranks: int) -> None:
    (level,) = fit(samples((ranks, 2e9, 5e-5)), CPU, ranks, (ranks,)).levels
    assert level.rate.bandwidth == pytest.approx(2e9, rel=0.05)
    assert level.rate.latency_s == pytest.approx(5e-5, rel=0.05)
    assert level.rate.error < 0.05


def test_two_levels_come_back_from_the_file_as_they_were_measured(tmp_path: Path) -> None:
    """Two nodes of four: what a group of all reached is what one of all is priced at; a device alone in its node gets
    the share of one network card in a ring, all of what one sends, and of an all-to-all, 4/7 of which crossed nodes, as
    much as did so."""
    made = samples((4, 1e11, 2e-6), (8, 4e9, 2e-5))
    found = fit(made, CPU, 8, (4, 8))
    assert [level.span for level in found.levels] == [4, 8]
    cluster = written(found, tmp_path / "cluster.toml")
    for s in (s for s in made if s.kind in COLLECTIVES):
        cost = group_cost(cluster, Degrees(tp=s.ranks, dp=8 // s.ranks), "tp")
        assert cost.seconds(s.kind, s.amount) == pytest.approx(s.seconds, rel=0.01), s
    alone = group_cost(cluster, Degrees(tp=4, dp=2), "dp")
    for kind in COLLECTIVES:
        card = GroupCost(2, {"send": 4e9, "all_to_all": 4e9 * 4 / 7}.get(kind, 1e9), 2e-5)
        assert alone.seconds(kind, 1e7) == pytest.approx(card.seconds(kind, 1e7), rel=0.01), kind


def test_each_collective_has_its_own_figures_over_groups_of_several_sizes(tmp_path: Path) -> None:
    """An emulated all-reduce takes ten times the latency of the others; a group of 2 uses the links of all 4."""
    rates = {kind: (1e9, 1e-3 if kind == "all_reduce" else 1e-4) for kind in COLLECTIVES} | {"send": (5e9, 2e-5)}
    made = [
        Sample(kind, "fp32", n, GroupCost(ranks, *rates[kind]).seconds(kind, n), ranks)
        for kind in COLLECTIVES for ranks in group_sizes((4,)) for n in (1e3, 1e5, 1e7)
    ]  # fmt: skip
    cluster = written(fit([*samples(), *made], CPU, 4, (4,)), tmp_path / "cluster.toml")
    for size in (2, 4):
        cost = group_cost(cluster, Degrees(tp=size, dp=4 // size), "tp")
        for kind, figures in rates.items():
            wanted = GroupCost(size, *figures)
            for nbytes in (0.0, 1e6):
                assert cost.seconds(kind, nbytes) == pytest.approx(wanted.seconds(kind, nbytes), rel=0.1)


def test_noise_on_both_sides_leaves_the_fit_in_the_middle() -> None:
    """Errors relative to the measured seconds alone would be least for a latency near the fastest samples."""
    exact = GroupCost(2, 1e9, 1e-4)
    noisy = [
        Sample("send", "fp32", n, exact.seconds("send", n) * factor, 2)
        for n in (1e3, 1e5, 1e6) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)
    ]  # fmt: skip
    (level,) = fit([*samples(), *noisy], CPU, 2, (2,)).levels
    send = dict(level.kinds)["send"]
    assert send.latency_s == pytest.approx(1e-4, rel=0.3)
    assert send.bandwidth == pytest.approx(1e9, rel=0.3)


def test_samples_without_a_slope_give_a_finite_bandwidth() -> None:
    flat = [Sample(kind, "fp32", n, 1e-4, 2) for kind in COLLECTIVES for n in (1e3, 1e4)]
    (level,) = fit([*samples(), *flat], CPU, 2, (2,)).levels
    assert 0 < level.rate.bandwidth < 1e15
    assert 1e-5 < level.rate.latency_s < 1e-3


def test_levels_follow_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _level_sizes(8) == (4, 8)
    assert _level_sizes(4) == (4,)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert _level_sizes(8) == (8,)
    assert _level_sizes(1) == ()


def written(found: Calibration, path: Path) -> ClusterSpec:
    path.write_text(found.toml(date(2026, 1, 2)), encoding="utf-8")
    assert "measured 2026-01-02" in path.read_text(encoding="utf-8")
    return ClusterSpec.load(path)


def test_the_file_loads_with_the_measured_figures(tmp_path: Path) -> None:
    found = fit(samples((4, 2e9, 5e-5)), CPU, 4, (4,))
    cluster = written(found, tmp_path / "cluster.toml")
    assert cluster.num_devices == 4
    assert cluster.device.kind == "cpu"
    assert cluster.device.flops["fp32"] == pytest.approx(1e11)
    assert cluster.device.memory_bandwidth * cluster.device.memory_efficiency == pytest.approx(6e9)
    assert cluster.device.launch_s == pytest.approx(2e-6)
    (link,) = cluster.links
    assert link.bandwidth * link.efficiency == pytest.approx(found.levels[0].rate.bandwidth, rel=1e-3)
    assert link.latency == pytest.approx(found.levels[0].rate.latency_s, rel=1e-2)


def test_a_gpu_file_names_no_preset_it_is_not(tmp_path: Path) -> None:
    found = dataclasses.replace(fit(samples((2, 1e11, 2e-6)), CPU, 2, (2,)), kind="cuda", device="NVIDIA X100")
    cluster = written(found, tmp_path / "cluster.toml")
    assert cluster.device.name == "NVIDIA X100"
    assert cluster.device.kind == "cuda"


def test_measuring_alone_goes_round_as_announced_and_takes_medians() -> None:
    seen: list[Sample] = []
    taken = measure(CPU, (), seen.append)
    assert len(seen) == measurement_count(CPU, ())
    rounds = len(seen) // len(taken)
    for i, sample in enumerate(taken):
        figures = sorted(s.seconds for s in seen[i :: len(taken)])
        assert sample.seconds == figures[rounds // 2]
    assert all(s.seconds > 0 and s.amount > 0 and s.ranks == 1 for s in taken)


class FakeGroup:
    """Of four ranks, seen from one of them."""

    def __init__(self, rank: int, backend: str = "nccl") -> None:
        self.rank, self.size = lambda: rank, lambda: 4
        self._get_backend = lambda device: SimpleNamespace(name=lambda: backend)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("nbytes", [1 << 10, 1000, 4])
def test_a_collective_moves_the_bytes_it_is_priced_for(
    nbytes: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tensors that are handed over: a rank's share of them crosses a link, by the definition of each kind. Over
    gloo the runtime makes an all-to-all and a sum of its own of a reduce-scatter."""
    moved: dict[str, float] = {}

    def cut(out: torch.Tensor, own: torch.Tensor) -> int:
        return max(out.nbytes, own.nbytes) - min(out.nbytes, own.nbytes)

    fakes: dict[str, Callable[..., None]] = {
        "all_reduce": lambda whole, **_: moved.update(all_reduce=2 * whole.nbytes * 3 / 4),
        "all_to_all_single": lambda out, own, **_: moved.update(all_to_all=own[own.numel() // 4 :].nbytes),
        "send": lambda message, peer, **_: moved.update(send=message.nbytes),
        "recv": lambda *_, **__: None,
        "get_process_group_ranks": lambda _: range(4),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(dist, name, fake)
    monkeypatch.setattr(measure_module, "all_gather_single", lambda o, i, **_: moved.update(all_gather=cut(o, i)))
    monkeypatch.setattr(collectives, "reduce_scatter_single", lambda o, i, **_: moved.update(reduce_scatter=cut(o, i)))
    seen = []
    for job in _collectives(nbytes, cast(dist.ProcessGroup, FakeGroup(0, backend)), CPU):
        moved.clear()
        job.prepare()()
        ((called, moved_bytes),) = moved.items()
        assert called == ("all_to_all" if job.kind == "reduce_scatter" and backend == "gloo" else job.kind)
        assert moved_bytes == GroupCost(4, 1.0, 0.0).seconds(job.kind, job.amount), job.kind
        assert job.amount == pytest.approx(nbytes, abs=4 * 16), job.kind
        assert job.shape.startswith(f"{job.amount:.0f} bytes")
        seen.append(job.kind)
    assert set(seen) == set(COLLECTIVES)


@pytest.mark.parametrize(("node", "nodes"), [(1, 2), (4, 2), (2, 3), (3, 3), (8, 1), (3, 1)])
def test_sends_pair_ranks_and_cross_nodes(node: int, nodes: int) -> None:
    ranks = node * nodes
    partners = {rank: send_partner(rank, ranks) for rank in range(ranks)}
    assert [rank for rank, peer in partners.items() if peer is None] == [ranks - 1] * (ranks % 2)
    for rank, peer in partners.items():
        if peer is not None:
            assert partners[peer] == rank != peer
            assert nodes == 1 or rank // node != peer // node


@pytest.mark.distributed
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    assert cli.main(["calibrate", "--ranks", "2", "-o", str(path)]) == 0
    assert "written to" in capsys.readouterr().out
    cluster = ClusterSpec.load(path)
    assert cluster.num_devices == 2
    assert 1e8 < cluster.device.flops["fp32"] < 1e13
    assert 1e6 < cluster.links[0].bandwidth < 1e11


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--ranks", "0"], "must be a positive integer"), (["-o", "none/cluster.toml"], "no folder")],
)
def test_bad_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_ranks_are_not_started_twice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["calibrate", "--ranks", "2"]) == 2
    assert "torchrun has started the ranks already" in capsys.readouterr().err
