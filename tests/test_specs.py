"""Cluster files, training specs: what is read, and the one sentence that refuses what is wrong."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import SpecError
from autopar.hardware import NODES
from autopar.mixed_cluster import mixed_cluster
from autopar.specs import ClusterSpec, CollectiveSpec, DeviceSpec, GroupSpec, LinkSpec, StackSpec, TrainSpec
from autopar.units import bandwidth_bytes_per_s, flops_per_s, memory_bytes, time_s

FILE = """
name = "two boxes"

[device]
memory = "80GB"
bf16_flops = "989T"
memory_bandwidth = "3.35TB/s"
power_derate = 0.8

[[link]]
name = "nvlink"
span = 8
bandwidth = "450GB/s"
latency = "2us"

[[link]]
name = "infiniband"
span = 16
bandwidth = "400Gb/s"
latency = "5us"
shared_by = 1
in_network_reduction = false

[stack]
attention = "cudnn"
elementwise = "te"
overlap = []
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_cluster_file_is_read_in_base_units(tmp_path: Path) -> None:
    cluster = ClusterSpec.load(written(tmp_path, FILE))
    assert cluster.name == "two boxes"
    assert cluster.num_devices == 16
    assert cluster.device.memory_bytes == 80_000_000_000
    assert cluster.device.flops == {"bf16": 989e12}
    assert cluster.device.memory_bandwidth == 3.35e12
    assert [link.bandwidth for link in cluster.links] == [450e9, 50e9]
    assert [link.latency for link in cluster.links] == [2e-6, 5e-6]
    assert cluster.stack == StackSpec(attention="cudnn", elementwise="te", overlap=())


def test_a_device_kind_gives_the_figures_the_file_leaves_out(tmp_path: Path) -> None:
    device_table = '[device]\nkind = "h100"\nmemory = "94GB"\nfp8_flops = "1P"\n'
    link_table = "[[link]]\nspan = 8\nbandwidth = 4.5e11\nlatency = 2e-6\n"
    device = ClusterSpec.load(written(tmp_path, device_table + link_table)).device
    known = ClusterSpec.preset("dgx-h100").device
    assert device == replace(known, memory_bytes=94 * 10**9, flops={**known.flops, "fp8": 1e15})


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("power_derate", "power_derat", "unknown key 'power_derat'.*did you mean 'power_derate'"),
        ("latency", "latencey", "link 1: unknown key 'latencey'.*did you mean 'latency'"),
        ("[stack]", "[stak]", "unknown key 'stak'.*did you mean 'stack'"),
        ("elementwise", "elementwse", "unknown key 'elementwse'.*did you mean 'elementwise'"),
        ('"80GB"', '"80 gigs"', "device.memory: must be a size such as"),
        ('"80GB"', "-1", "device.memory: must be a size"),
        ('"80GB"', '"0GB"', "device.memory: must be a size"),
        ('"80GB"', "nan", "device.memory: must be a size"),
        ('"3.35TB/s"', "inf", "device.memory_bandwidth: must be a bandwidth"),
        ('"400Gb/s"', '"1.2.3Gb/s"', "link 2.bandwidth: must be a bandwidth"),
        ('"2us"', '"0us"', "link 1.latency: must be a time"),
        ('"2us"', "true", "link 1.latency: must be a time"),
        ("0.8", "1.5", "device.power_derate: must be a fraction"),
        ('"cudnn"', '"magic"', "stack.attention: 'magic' is not one of flash"),
        ("overlap = []", 'overlap = "dp_reduce"', "stack.overlap: must be a list"),
        ("span = 16", "span = 12", "span: 12 is not a multiple of 8"),
        ("span = 16", "span = 8", "span: 8 is not above 8"),
        ('name = "two boxes"', "num_devices = 32", "spans 16 of 32 devices"),
        ('bandwidth = "450GB/s"', "", "link 1: missing bandwidth"),
        ('memory = "80GB"', "", "device: missing memory"),
        ('memory = "80GB"', 'kind = "h101"', "unknown kind 'h101'.*did you mean 'h100'"),
        ("[stack]", "[[group]]\ncount = 2\n[stack]", "unknown key 'device'"),
        ("[device]", "[device", "not TOML"),
    ],
)
def test_wrong_files_are_refused_with_file_and_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in FILE
    path = written(tmp_path, FILE.replace(old, new, 1))
    with pytest.raises(SpecError, match=says) as caught:
        ClusterSpec.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read the cluster file: No such file"):
        ClusterSpec.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (memory_bytes, "80GB", 80e9),
        (memory_bytes, "80 GiB", 80 * 2**30),
        (memory_bytes, "1.5TB", 1.5e12),
        (memory_bytes, 1024, 1024),
        (bandwidth_bytes_per_s, "400Gb/s", 50e9),
        (bandwidth_bytes_per_s, "400Gbps", 50e9),
        (bandwidth_bytes_per_s, "450GB/s", 450e9),
        (bandwidth_bytes_per_s, 1e9, 1e9),
        (time_s, "2us", 2e-6),
        (time_s, "1.5 ms", 1.5e-3),
        (flops_per_s, "989T", 989e12),
        (flops_per_s, "2.25 PFLOPS", 2.25e15),
        (flops_per_s, 3e14, 3e14),
    ],
)
def test_units(read: Any, text: Any, value: float) -> None:
    assert read(text, "here") == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("name", sorted(NODES))
def test_presets_are_legal_and_reached_by_name(name: str) -> None:
    cluster = ClusterSpec.parse(f"{name}:2")
    assert cluster == ClusterSpec.preset(name, nodes=2)
    assert cluster.num_devices == 2 * NODES[name].devices_per_node
    assert ClusterSpec.parse(name).num_devices == NODES[name].devices_per_node


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dgx-h1000:2", "did you mean 'dgx-h100'"),
        ("dgx-h100:two", "not a number of nodes: 'two'"),
        ("dgx-h100:", "not a number of nodes"),
        ("dgx-h100:-1", "not a number of nodes"),
        ("dgx-h100:0", "positive integer"),
        ("clusters/none.toml", "cannot read the cluster file"),
    ],
)
def test_wrong_cluster_names(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        ClusterSpec.parse(text)


def test_a_spec_built_in_python_meets_the_same_checks() -> None:
    link = LinkSpec(name="a", span=8, bandwidth=1e9, latency=1e-6)
    device = DeviceSpec(name="d", memory_bytes=1, flops={"fp32": 1.0}, memory_bandwidth=1.0)
    with pytest.raises(SpecError, match="link 'a': bandwidth: must be a positive number, not nan"):
        replace(link, bandwidth=math.nan)
    with pytest.raises(SpecError, match="at least one peak rate"):
        replace(device, flops={})
    with pytest.raises(SpecError, match="'fp31' is not one of"):
        replace(device, flops={"fp31": 1.0})
    with pytest.raises(SpecError, match="no memory is left"):
        replace(device, reserved_bytes=1)
    with pytest.raises(SpecError, match="nothing joins the 8 devices"):
        ClusterSpec(name="c", device=device, num_devices=8, links=())
    assert ClusterSpec(name="c", device=device, num_devices=1, links=()).links == ()


@pytest.mark.parametrize(
    "values",
    [{"global_batch": 0}, {"seq_len": -1}, {"global_batch": True}, {"precision": "fp12"}, {"optimizer": "lion"}],
)
def test_wrong_training_specs(values: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"train.{next(iter(values))}"):
        TrainSpec(**values)


def test_fingerprints_follow_the_content_not_the_name() -> None:
    cluster = ClusterSpec.preset("dgx-h100", nodes=2)
    same = pickle.loads(pickle.dumps(replace(cluster, name="other")))
    assert same.fingerprint == cluster.fingerprint
    slower = replace(cluster, device=replace(cluster.device, power_derate=0.9))
    assert slower.fingerprint != cluster.fingerprint
    assert hash(slower) != hash(cluster)
    assert TrainSpec(seq_len=8).fingerprint != TrainSpec(seq_len=16).fingerprint


@pytest.mark.parametrize("text", ["local:99999999999", "dgx-h100:200000", "local:" + "9" * 5000])
def test_a_cluster_too_large_to_plan_is_refused_with_the_limit(text: str) -> None:
    with pytest.raises(SpecError, match="at most|not a number of nodes") as caught:
        ClusterSpec.parse(text)
    assert len(str(caught.value)) < 200


def test_a_batch_too_large_to_divide_is_refused_with_the_limit() -> None:
    with pytest.raises(SpecError, match="at most 2147483647, not 99999999999999999999"):
        TrainSpec(global_batch=99999999999999999999)


@pytest.mark.parametrize("value", ["9" * 400, "[]", "{}", "nan", "-1", '"1e999GB"'])
def test_a_figure_no_device_has_is_refused_by_key(tmp_path: Path, value: str) -> None:
    for key in ("memory", "kind", "matmul_efficiency"):
        path = written(tmp_path, f'[device]\nbf16_flops = "1T"\nmemory_bandwidth = "1TB/s"\n{key} = {value}\n')
        with pytest.raises(SpecError, match="device"):
            ClusterSpec.load(path)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('[link.send]\nbandwidth = "1GB/s"', "missing latency"),
        ("[link.send]", "missing bandwidth, latency"),
        ('[link.send]\nbandwidth = "1GB/s"\nlatency = "1us"\nspan = 2', "unknown key 'span'"),
        ('[link.sends]\nbandwidth = "1GB/s"\nlatency = "1us"', "unknown key 'sends'"),
        ("send = 3", r"must be a table \[send\]"),
        ('[link.send]\nbandwidth = 0\nlatency = "1us"', "link 1.send.bandwidth: must be a bandwidth"),
    ],
)
def test_figures_of_a_collective_are_checked(tmp_path: Path, table: str, says: str) -> None:
    link = '[device]\nkind = "h100"\n[[link]]\nspan = 8\nbandwidth = "1GB/s"\nlatency = "1us"\n'
    with pytest.raises(SpecError, match=says):
        ClusterSpec.load(written(tmp_path, link + table))


def test_a_collective_has_figures_once() -> None:
    send = CollectiveSpec(kind="send", bandwidth=1e9, latency=1e-6)
    with pytest.raises(SpecError, match="the collective send is given twice"):
        LinkSpec(name="a", span=8, bandwidth=1e9, latency=1e-6, collectives=(send, send))
    with pytest.raises(SpecError, match="link: collective"):
        replace(send, kind="broadcast")


def test_mixed_groups_take_the_slowest_figures_of_each_collective() -> None:
    """A group without figures of sends counts with those of its link, less its efficiency."""
    send = CollectiveSpec(kind="send", bandwidth=30e9, latency=1e-6)
    fast = LinkSpec(name="fast", span=4, bandwidth=100e9, latency=2e-6, efficiency=0.5, collectives=(send,))
    slow = LinkSpec(name="slow", span=4, bandwidth=20e9, latency=3e-6, efficiency=0.5)
    between = LinkSpec(name="between", span=8, bandwidth=1e9, latency=1e-5)
    device = DeviceSpec(name="d", memory_bytes=1 << 33, flops={"fp32": 1e12}, memory_bandwidth=1e11, reserved_bytes=0)
    groups = tuple(GroupSpec(name=link.name, device=device, num_devices=4, links=(link,)) for link in (fast, slow))
    inner, outer = mixed_cluster("mixed", groups, between, StackSpec()).links
    assert inner.collectives == (CollectiveSpec(kind="send", bandwidth=10e9, latency=3e-6),)
    assert inner.rate("all_gather") == (10e9, 3e-6)
    assert outer.collectives == ()
