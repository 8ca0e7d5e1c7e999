"""Collective prices against hand-computed ones, and the placement of groups on a two-level network."""

from __future__ import annotations

import pytest

from autopar.cost_model.comm_cost import GroupCost, group_cost
from autopar.hardware import preset
from autopar.mesh import Degrees

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


def test_a_group_that_straddles_nodes_pays_the_network() -> None:
    cluster = preset("dgx-h100", 3)
    straddling = group_cost(cluster, Degrees(dp=2, tp=12), "tp")
    assert straddling.bytes_per_s == pytest.approx(4 * 50 * GB * cluster.links[1].efficiency)
