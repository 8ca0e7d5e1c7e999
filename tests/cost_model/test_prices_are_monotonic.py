"""A better machine is never slower and more work never faster, whatever the layout: each term hides behind others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.constant_table import load_constants
from autopar.specs import ClusterSpec

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")

GPT = {"hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192, "gated_mlp": False, "vocab": 51200}
LLAMA = {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated_mlp": True, "vocab": 128256}
STACKS = ("Megatron-LM 2022", "Megatron-LM", "Megatron-Bridge", "NeMo", "torchtitan", "PyTorch FSDP", "InternLM", "?")


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_on_path() -> Iterator[None]:
    sys.path.insert(0, BENCHMARKS)
    yield
    sys.path.remove(BENCHMARKS)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """A row of published runs, without what was measured."""
    tp, pp, cp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 8), (1, 2, 4), (1, 2, 4), (1, 2, 8)))
    virtual = draw(st.sampled_from((1, 2))) if pp > 1 else 1
    mbs, count = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 4, 16)))
    zero = draw(st.sampled_from((0, 1, 2, 3)))
    shape = draw(st.sampled_from((GPT, LLAMA)))
    return {
        **shape, "id": "drawn", "tp": tp, "pp": pp, "cp": cp, "dp": dp, "vpp": virtual, "n_gpus": tp * pp * cp * dp,
        "layers": pp * virtual * draw(st.integers(1, 3)), "seq": draw(st.sampled_from((2048, 8192))), "mbs": mbs,
        "gbs": dp * mbs * count, "zero": zero, "zero_shard_gpus": draw(st.sampled_from((None, dp))),
        "sp": draw(st.booleans()), "recompute": draw(st.sampled_from(("none", "selective", "full"))),
        "precision": "bf16", "framework": draw(st.sampled_from(STACKS)), "oom": True, "gpus_per_node": 8,
        "gpu": draw(st.sampled_from(("A100-80G", "H100-80G", "B200-180G"))),
        "uncertain": draw(st.sampled_from(([], ["cp_comm_type=a2a"]))),
    }  # fmt: skip


def seconds(row: dict[str, Any], changes: Callable[[ClusterSpec], Iterator[ClusterSpec]] | None = None) -> list[float]:
    """Of a step; and on what `changes` makes of the row's cluster."""
    from published_rows import as_run
    from row_work import run_work

    from autopar.cost_model.machine import Machine
    from autopar.cost_model.run_price import price_run

    run, constants = as_run(row), load_constants()
    work, found = run_work(run), []
    for cluster in (run.cluster, *(changes(run.cluster) if changes else ())):
        machine = Machine.of(cluster.device, cluster.stack, "bf16", constants=constants)
        table = constants.of(cluster.device)
        found.append(price_run(work, run.layout, cluster, run.traits, machine, table)["total"])
    return found


def better(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    device = cluster.device
    for other in (
        replace(device, flops={k: 1.5 * v for k, v in device.flops.items()}),
        replace(device, memory_bandwidth=1.5 * device.memory_bandwidth),
        replace(device, launch_s=device.launch_s / 2),
    ):
        yield replace(cluster, device=other)
    for i, link in enumerate(cluster.links):
        for faster in (replace(link, bandwidth=1.5 * link.bandwidth), replace(link, latency=link.latency / 2)):
            yield replace(cluster, links=(*cluster.links[:i], faster, *cluster.links[i + 1 :]))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(row=rows())
def test_a_better_machine_is_never_slower(row: dict[str, Any]) -> None:
    here, *there = seconds(row, better)
    assert max(there) <= here * (1 + 1e-12), there


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(row=rows())
def test_more_work_is_never_faster(row: dict[str, Any]) -> None:
    (here,) = seconds(row)
    more = {"seq": 2 * row["seq"], "layers": row["layers"] + row["pp"] * row["vpp"], "gbs": 2 * row["gbs"],
            "vocab": 2 * row["vocab"]}  # fmt: skip
    for field, value in more.items():
        assert seconds({**row, field: value})[0] >= here * (1 - 1e-12), field
