"""Collective prices against hand-computed ones, and the placement of groups on a two-level network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost_model.comm_cost import GroupCost, group_cost
from autopar.hardware import preset
from autopar.mesh import Degrees
from autopar.specs import ClusterSpec, CollectiveSpec, LinkSpec

GB = 1e9


def test_ring_bytes_per_rank() -> None:
    group = GroupCost(4, 1 * GB, 0.0)
    assert group.seconds("all_gather", 1 * GB) == pytest.approx(0.75)
    assert group.seconds("reduce_scatter", 1 * GB) == pytest.approx(0.75)
    assert group.seconds("all_reduce", 1 * GB) == pytest.approx(1.5)
    assert group.seconds("all_to_all", 1 * GB) == pytest.approx(0.75 / 4)
    assert group.seconds("slice", 1 * GB) == 0.0


def test_latency_is_paid_per_step() -> None:
    group = GroupCost(8, 1 * GB, 1e-6)
    assert group.seconds("all_gather", 0) == pytest.approx(7e-6)
    assert group.seconds("all_reduce", 0) == pytest.approx(6e-6)  # the tree wins: 2 log2(8)


def test_one_rank_pays_nothing() -> None:
    assert group_cost(preset("dgx-h100", 4), Degrees(dp=32), "tp").seconds("all_reduce", GB) == 0.0


def test_groups_inside_a_node_use_its_links() -> None:
    cluster = preset("dgx-h100", 4)
    inside = group_cost(cluster, Degrees(tp=8, dp=4), "tp")
    assert (inside.bytes_per_s, inside.latency_s) == (pytest.approx(450 * GB * cluster.links[0].efficiency), 2e-6)


def test_members_in_a_node_add_their_network_cards() -> None:
    cluster = preset("dgx-h100", 4)
    alone = group_cost(cluster, Degrees(tp=8, dp=4), "dp")
    assert alone.bytes_per_s == pytest.approx(50 * GB * cluster.links[1].efficiency)  # one member a node
    pairs = group_cost(cluster, Degrees(tp=4, dp=8), "dp")
    assert pairs.bytes_per_s == pytest.approx(2 * 50 * GB * cluster.links[1].efficiency)
    whole = group_cost(cluster, Degrees(dp=32), "dp")
    network, inside = 8 * 50 * cluster.links[1].efficiency, 450 * cluster.links[0].efficiency
    assert whole.bytes_per_s == pytest.approx(min(network, inside) * GB)
    assert whole.latency_s == 5e-6


TWO_LEVELS = """
[device]
kind = "h100"

[[link]]
name = "nvlink"
span = 4
bandwidth = "400GB/s"
latency = "2us"
efficiency = 0.5

[[link]]
name = "network"
span = 8
bandwidth = "50GB/s"
latency = "5us"
efficiency = 0.8

[link.send]
bandwidth = "30GB/s"
latency = "10us"
"""


def test_figures_of_one_collective_on_one_level_only(tmp_path: Path) -> None:
    """Two nodes of four. A send passes through one card, however many ranks of its group a node has; a send inside a
    node, and all else, goes by the link."""
    path = tmp_path / "cluster.toml"
    path.write_text(TWO_LEVELS, encoding="utf-8")
    cluster = ClusterSpec.load(path)
    whole, alone, inside = (group_cost(cluster, Degrees(tp=tp, pp=8 // tp), axis)
                            for tp, axis in ((8, "tp"), (4, "pp"), (4, "tp")))  # fmt: skip
    for group in (whole, alone):
        assert group.seconds("send", GB) == pytest.approx(1 / 30 + 1e-5)
    assert inside.seconds("send", GB) == pytest.approx(1 / 200 + 2e-6)
    assert whole.seconds("all_gather", GB) == pytest.approx(7 / 8 / (4 * 40) + 7 * 5e-6)
    assert alone.seconds("all_gather", GB) == pytest.approx(1 / 2 / 40 + 5e-6)
    assert inside.seconds("all_gather", GB) == pytest.approx(3 / 4 / 200 + 3 * 2e-6)


def test_the_slowest_level_counts_for_each_collective() -> None:
    """The inner level is the slower one for gathers, the outer one for sends; latencies are the longest of both."""
    inner = LinkSpec(name="inner", span=2, bandwidth=100 * GB, latency=1e-6, efficiency=1.0,
                     collectives=(CollectiveSpec(kind="all_gather", bandwidth=10 * GB, latency=7e-6),))  # fmt: skip
    outer = LinkSpec(name="outer", span=4, bandwidth=40 * GB, latency=5e-6, efficiency=1.0,
                     collectives=(CollectiveSpec(kind="send", bandwidth=20 * GB, latency=9e-6),))  # fmt: skip
    cluster = replace(preset("dgx-h100", 1), num_devices=4, links=(inner, outer))
    group = group_cost(cluster, Degrees(tp=4), "tp")
    half = 40 * GB * 3 / 2  # of three parts that a rank sends, two leave the pair
    assert group.own == (("all_gather", 10 * GB, 7e-6), ("all_to_all", half, 5e-6), ("send", 20 * GB, 9e-6))
    assert (group.bytes_per_s, group.latency_s) == (80 * GB, 5e-6)  # two cards a node


def test_what_crosses_nodes_is_counted_card_by_card() -> None:
    """Two nodes of eight; a group of 16, of 8 that has four members in each node, and of 2, one in each."""
    cluster = preset("dgx-h100", 2)
    card, inside = (link.bandwidth * link.efficiency for link in reversed(cluster.links))
    for degrees, members in ((Degrees(cp=16), 8), (Degrees(cp=8, tp=2), 4), (Degrees(cp=2, tp=8), 1)):
        group, n = group_cost(cluster, degrees, "cp"), 2 * members
        part_out = 16 * GB / n * members / n  # of its nth, to the ranks of the other node
        assert group.seconds("all_to_all", 16 * GB) == pytest.approx(part_out / min(card, inside), rel=0.01)
        assert group.seconds("send", GB) == pytest.approx(GB / card, rel=1e-3)


def test_a_stage_receives_across_nodes_from_one_side_only() -> None:
    """Four stages, two a node: each has a neighbour beside it and one in the other node. One a node: both are away."""
    cluster = preset("dgx-h100", 4)
    card, inside = (link.bandwidth * link.efficiency for link in reversed(cluster.links))
    beside = group_cost(cluster, Degrees(tp=4, pp=8), "pp").between_neighbours(GB)
    assert beside == pytest.approx(GB / card + GB / inside, rel=1e-3)
    away = group_cost(cluster, Degrees(tp=8, pp=4), "pp").between_neighbours(GB)
    assert away == pytest.approx(2 * GB / card, rel=1e-3)
    within = group_cost(cluster, Degrees(tp=8, pp=4), "tp").between_neighbours(GB)
    assert within == pytest.approx(2 * GB / inside, rel=1e-3)


def test_hidden_traffic_slows_compute_by_the_memory_it_takes() -> None:
    cluster = preset("dgx-h100", 4)
    slow, fast = (group_cost(cluster, Degrees(tp=tp, dp=32 // tp), "dp") for tp in (8, 1))
    assert slow.comes_back(5, 3e12) == pytest.approx(5 * slow.bytes_per_s / 3e12)
    assert fast.comes_back(5, 3e12) == pytest.approx(5 * fast.bytes_per_s / 3e12)
    assert fast.comes_back(5, 1e11) == 1.0  # no more than the collective itself
    assert group_cost(cluster, Degrees(tp=32), "dp").comes_back(5, 3e12) == 0.0


def test_equal_messages_pay_latency_each() -> None:
    group = GroupCost(4, 1 * GB, 1e-3)
    assert group.in_messages("all_gather", 1 * GB, 1) == pytest.approx(0.75 + 3e-3)
    assert group.in_messages("all_gather", 1 * GB, 5) == pytest.approx(0.75 + 5 * 3e-3)
    assert group.in_messages("all_gather", 1 * GB, 0) == 0.0


def test_a_group_that_straddles_nodes_pays_the_network() -> None:
    cluster = preset("dgx-h100", 3)
    straddling = group_cost(cluster, Degrees(dp=2, tp=12), "tp")
    assert straddling.bytes_per_s == pytest.approx(4 * 50 * GB * cluster.links[1].efficiency)
