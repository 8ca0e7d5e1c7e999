"""Storages are counted once, from the op that makes them to the last reference; collectives by the whole tensor."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.dryrun.fake_world import FakeWorld, fake_process_group
from autopar.dryrun.recorder import Issued, Recorder
from autopar.mesh import Degrees


def test_views_cost_nothing_and_freed_storages_leave() -> None:
    with Recorder() as recorder:
        x = torch.empty(100)
        y = x.view(10, 10)[2:]
        z = x + 1
        assert recorder.now["activations"] == 800
        del z
        assert recorder.now["activations"] == 400
        del x
        assert recorder.now["activations"] == 400  # y still holds the storage
        del y
        assert recorder.now["activations"] == 0
    assert recorder.peak_bytes == 800


def test_what_autograd_keeps_is_counted() -> None:
    with Recorder() as recorder:
        weight = torch.ones(10, requires_grad=True)
        loss = (weight * torch.ones(10)).exp().sum()
        held = recorder.now["activations"]
        assert held == 40 + 40 + 40 + 4  # weight, the other factor, exp's result, the loss
        loss.backward()
        del loss
        assert recorder.now["activations"] == 40 + 40  # weight and its gradient


def test_tensors_on_the_meta_device_hold_nothing() -> None:
    with Recorder() as recorder:
        kept = torch.empty(100, device="meta")
        assert recorder.now["activations"] == 0
    assert kept.shape == (100,)


def test_categories_and_claims() -> None:
    with Recorder() as recorder:
        with recorder.category("parameters"):
            weight = torch.empty(10)
        recorder.claim(weight, "optimizer")
        outside = torch.empty(3)
    recorder.claim(outside, "inputs")
    assert recorder.now == {"parameters": 0, "optimizer": 40, "activations": 0, "inputs": 12}
    assert recorder.peak == {"parameters": 0, "optimizer": 40, "activations": 12}


def test_collectives_of_every_kind() -> None:
    degrees = Degrees(dp=2, tp=4)
    with fake_process_group(5, 8), Recorder() as recorder:
        world = FakeWorld(degrees, 5)
        assert world.position == {"pp": 0, "dp": 1, "cp": 0, "tp": 1}
        group = world.group("tp")
        part, whole = torch.zeros(8), torch.zeros(32)
        dist.all_reduce(whole, group=group)
        dist.all_gather([torch.zeros(8) for _ in range(4)], part, group=group)
        dist.all_to_all_single(torch.zeros(8), part, group=group)
        dist.broadcast(part, src=world.global_rank("dp", 0), group=world.group("dp"))
        send = dist.isend(part, world.global_rank("dp", 0), group=world.group("dp"))
        assert send is not None
        send.wait()
        names = {name: axis for axis, name in world.group_names().items()}
        assert [(i.kind, names[i.group], i.nbytes) for i in recorder.issued] == [
            ("all_reduce", "tp", 128),
            ("all_gather", "tp", 128),
            ("all_to_all", "tp", 128),
            ("broadcast", "dp", 32),
            ("send", "dp", 32),
        ]
        assert world.axis_of(recorder.issued[0].group) == "tp"
        assert isinstance(recorder.issued[0], Issued)
    assert not dist.is_initialized()
