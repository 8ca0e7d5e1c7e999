"""Random models, devices, links and settings for the tests that hold the search against brute force."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.specs import DeviceSpec, LinkSpec
from autopar.trace import trace
from tests import models

OVERLAPS: list[tuple[str, ...]] = [(), ("dp_reduce",), ("dp_reduce", "tp_linear", "tp_ring", "pp_send")]

KINDS: dict[str, Callable[[int], str | None]] = {
    "two": lambda layer: "b" if layer > 1 else None,
    "first": lambda layer: "b" if layer > 0 else None,
    "alternating": lambda layer: "b" if layer % 2 else None,
    "three": lambda layer: {0: None, 5: "c"}.get(layer, "b"),
}
"""Classes of layers by number; None: the one they have."""


def of_sizes(*layers: int) -> list[TracedModel]:
    """Models of equal layers with a tied head."""
    found = (models.TinyGPT(layers=n).to(torch.float32) for n in layers)
    return [prepare(trace(model, models.default_batch())) for model in found]


def of_kinds(model: TracedModel, name: str) -> TracedModel:
    """The model as if its layers were of several classes."""
    first = min(s.index for s in model.segments if s.kind == "layer")
    return replace(model, segments=tuple(
        replace(s, class_id=KINDS[name](s.index - first) or s.class_id) if s.kind == "layer" else s
        for s in model.segments
    ))  # fmt: skip


def random_device(rng: random.Random) -> DeviceSpec:
    """A CPU whose rates and memory are drawn over decades."""
    rate = 10 ** rng.uniform(9, 11)
    return replace(
        preset("local", 1).device, memory_bytes=int(10 ** rng.uniform(5.3, 6.6)), reserved_bytes=0,
        flops={"fp32": rate, "bf16": rate}, memory_bandwidth=10 ** rng.uniform(9, 11),
        launch_s=10 ** rng.uniform(-7, -5),
    )  # fmt: skip


def random_link(rng: random.Random, span: int) -> LinkSpec:
    return LinkSpec(name="net", span=span, bandwidth=10 ** rng.uniform(7, 10), latency=10 ** rng.uniform(-7, -4))
