"""The engine on hand-made stages against the plain model in one process (fp64), every kind of mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, PlanMismatchError, SpecError
from autopar.mesh import Degrees
from autopar.runtime.launch import run_ranks
from tests.runtime import hand_made

MESHES = [
    Degrees(dp=2),
    Degrees(tp=2),
    Degrees(pp=2),
    Degrees(dp=2, tp=2),
    Degrees(dp=2, pp=2),
    Degrees(tp=2, pp=2),
    Degrees(pp=4),
]


def _reference(
    model: torch.nn.Module, batches: list[dict[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of SGD steps, gradients of the first, weights after all."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], {}
    for batch in batches:
        loss = model(**batch)["loss"]
        loss.backward()
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, model.state_dict()


def _close(a: Tensor, b: Tensor, name: str) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=lambda m: f"{name}: {m}")


def _train(degrees: Degrees, options: dict[str, Any]) -> None:
    model = hand_made.build()
    batches = [hand_made.batch(seq=6), hand_made.batch(seq=4, seed=2), hand_made.batch(rows=16, seq=6, seed=3)]
    losses, gradients, weights = _reference(model, batches)
    pm = hand_made.parallel(model, hand_made.capture(model), degrees, **options)
    assert pm.notices == []
    optimizer = pm.optimizer(torch.optim.SGD, lr=0.1)
    for i, batch in enumerate(batches):
        loss = pm.step(batch)
        assert loss.shape == ()
        _close(loss, torch.tensor(losses[i], dtype=torch.float64), f"loss {i}")
        if i == 0:
            mine = {name: g for name, g in pm.full_gradients().items() if g is not None}
            assert mine.keys() == gradients.keys()
            for name, gradient in mine.items():
                _close(gradient, gradients[name], name)
        optimizer.step()
        optimizer.zero_grad()
    state = pm.state_dict()
    assert list(state) == list(weights)
    for name, value in state.items():
        _close(value, weights[name], name)
    _check_copies_are_equal(pm)


def _check_copies_are_equal(pm: Any) -> None:
    """The tied weight's copies on first and last stage, and every dp replica, are the same to the bit."""
    parameters = dict(pm.named_parameters())
    for group_sum in pm._reducer._sums:
        if len(group_sum.ranks) < group_sum.group.size() or group_sum.group is pm.world.group("pp"):
            mine = parameters["embed.weight"].detach().contiguous()
            (other,) = (rank for rank in group_sum.ranks if rank != dist.get_rank())
            theirs = torch.empty_like(mine)
            send, receive = dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            assert torch.equal(mine, theirs)
    assert pm.differing_copies() == []
    if pm.world.group("dp") is not None:
        for p in parameters.values():
            first = p.detach().clone()
            pm.world.broadcast(first, "dp", 0)
            assert torch.equal(first, p)


@pytest.mark.distributed
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_training_equals_one_process(degrees: Degrees) -> None:
    run_ranks(degrees.world_size, _train, degrees, {}, timeout_s=60)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options", [{"checkpoint": True}, {"schedule": "gpipe", "micro_batch": 2}, {"micro_batch": 4}], ids=str
)
def test_options_change_nothing(options: dict[str, Any]) -> None:
    run_ranks(4, _train, Degrees(tp=2, pp=2), options, timeout_s=60)


def _forward_and_backward(degrees: Degrees) -> None:
    model, batch = hand_made.build(), hand_made.batch()
    pm = hand_made.parallel(model, hand_made.capture(model), degrees)
    reference = copy.deepcopy(model)
    outputs = reference(**batch)
    own_loss = lambda logits: (logits.softmax(-1) ** 2).mean()  # noqa: E731
    (outputs["loss"] + own_loss(outputs["logits"])).backward()
    mine = pm(**batch)
    assert type(mine) is dict
    _close(mine["loss"], outputs["loss"], "loss")
    _close(mine["logits"], outputs["logits"], "logits")
    (mine["loss"] + own_loss(mine["logits"])).backward()
    expected = dict(reference.named_parameters())
    for name, gradient in pm.full_gradients().items():
        _close(gradient, expected[name].grad, name)
    # A second call accumulates: what was reduced already must not be reduced again.
    pm(**batch)["loss"].backward()
    reference(**batch)["loss"].backward()
    for name, gradient in pm.full_gradients().items():
        _close(gradient, expected[name].grad, f"accumulated {name}")


@pytest.mark.distributed
@pytest.mark.parametrize("degrees", [Degrees(dp=2), Degrees(tp=2), Degrees(dp=2, tp=2)], ids=str)
def test_calling_the_module_equals_one_process(degrees: Degrees) -> None:
    run_ranks(degrees.world_size, _forward_and_backward, degrees, timeout_s=60)


def _accumulate_steps(degrees: Degrees) -> None:
    model = hand_made.build()
    pm = hand_made.parallel(model, hand_made.capture(model), degrees)
    reference = copy.deepcopy(model)
    for seed in (1, 2):
        pm.step(hand_made.batch(seed=seed))
        reference(**hand_made.batch(seed=seed))["loss"].backward()
    expected = dict(reference.named_parameters())
    for name, gradient in pm.full_gradients().items():
        _close(gradient, expected[name].grad, name)


@pytest.mark.distributed
@pytest.mark.parametrize("degrees", [Degrees(dp=2, tp=2), Degrees(dp=2, pp=2)], ids=str)
def test_two_steps_without_zero_grad_add_up(degrees: Degrees) -> None:
    run_ranks(degrees.world_size, _accumulate_steps, degrees, timeout_s=60)


def _local_rows() -> None:
    model, batch = hand_made.build(), hand_made.batch()
    pm = hand_made.parallel(model, hand_made.capture(model), Degrees(dp=2))
    reference = model(**batch)["loss"]
    mine = {name: t[4 * dist.get_rank() :][:4] for name, t in batch.items()}
    _close(pm.step(mine, local=True), reference, "loss")


def _unequal_rows() -> None:
    """5 rows here, 2 there: as one process on the seven; what cannot be is refused by all ranks alike."""
    model, batch = hand_made.build(), hand_made.batch(rows=7)
    loss = model(**batch)["loss"]
    loss.backward()
    mine = {name: t[:5] if dist.get_rank() == 0 else t[5:] for name, t in batch.items()}
    traced = hand_made.capture(model)
    pm = hand_made.parallel(hand_made.build(), traced, Degrees(dp=2))
    _close(pm.step(mine, local=True), loss, "loss")
    for name, gradient in pm.full_gradients().items():
        _close(gradient, dict(model.named_parameters())[name].grad, name)
    pm = hand_made.parallel(hand_made.build(), traced, Degrees(dp=2), zero=3)
    with pytest.raises(SpecError, match="dp ranks bring 5, 2 rows.*under ZeRO.*5 rows on every rank"):
        pm.step(mine, local=True)  # it counts by its own graph, in which no row can be made to count nothing
    pm = hand_made.parallel(hand_made.build(), traced, Degrees(dp=2), micro_batch=2)
    with pytest.raises(SpecError, match="5 rows do not divide into micro-batches of 2"):
        pm.step(mine, local=True)
    none = {name: t[: 4 * (1 - dist.get_rank())] for name, t in batch.items()}
    with pytest.raises(SpecError, match="dp rank 1 has no rows.*one row at least on every rank$"):
        pm.step(none, local=True)


@pytest.mark.distributed
def test_ranks_may_bring_different_numbers_of_rows() -> None:
    run_ranks(2, _unequal_rows, timeout_s=60)


@pytest.mark.distributed
def test_each_rank_may_bring_its_own_rows() -> None:
    run_ranks(2, _local_rows, timeout_s=60)


def _overlap_changes_no_bit(path: str) -> None:
    gradients = []
    for overlap in (True, False):
        model = hand_made.build()
        pm = hand_made.parallel(model, hand_made.capture(model), Degrees(dp=2), overlap=overlap, bucket_bytes=4096)
        sends: list[int] = []
        backward_ends: list[int] = []
        send = pm._reducer._send
        pm._reducer._send = lambda bucket, send=send, sends=sends: (sends.append(len(sends)), send(bucket))[1]
        pm._state.parameters["embed.weight"].register_post_accumulate_grad_hook(
            lambda _, sends=sends, ends=backward_ends: ends.append(len(sends))
        )
        pm.step(hand_made.batch())
        # 4 micro-batches: nothing may be sent before the last, and with overlap most has left before its last gradient.
        assert backward_ends[:3] == [0, 0, 0]
        assert (backward_ends[3] >= 4) is overlap
        gradients.append([p.grad.clone() for p in pm.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.distributed
def test_gradients_leave_during_the_last_backward_and_are_the_same_to_the_bit() -> None:
    run_ranks(2, _overlap_changes_no_bit, "", timeout_s=60)


def _different_seeds() -> list[str]:
    model = hand_made.build(seed=dist.get_rank())
    pm = hand_made.parallel(model, hand_made.capture(model), Degrees(tp=2))
    for name, value in hand_made.build(seed=0).state_dict().items():
        assert torch.equal(pm.state_dict()[name], value)
    return pm.notices


@pytest.mark.distributed
def test_models_built_from_different_seeds_become_rank_zeros() -> None:
    for notices in run_ranks(2, _different_seeds, timeout_s=60):
        assert "differed between ranks" in notices[0]


def _load(degrees: Degrees) -> None:
    model, other = hand_made.build(), hand_made.build(seed=5)
    pm = hand_made.parallel(model, hand_made.capture(model), degrees)
    pm.load_state_dict(other.state_dict())
    for name, value in pm.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    _close(pm.step(hand_made.batch()), other(**hand_made.batch())["loss"], "loss")
    with pytest.raises(AutoparError, match="norm.bias"):
        pm.load_state_dict({k: v for k, v in other.state_dict().items() if k != "norm.bias"})


@pytest.mark.distributed
def test_a_whole_state_is_loaded_into_slices() -> None:
    run_ranks(4, _load, Degrees(tp=2, pp=2), timeout_s=60)


def _refusals() -> None:
    model = hand_made.build()
    traced = hand_made.capture(model)
    with pytest.raises(PlanMismatchError, match="the plan is for 4 processes .*, 2 are running"):
        hand_made.parallel(model, traced, Degrees(dp=4))
    with pytest.raises(PlanMismatchError, match="ranks 1 hold another plan than rank 0"):
        hand_made.parallel(model, traced, Degrees(dp=2), micro_batch=1 + dist.get_rank())
    pm = hand_made.parallel(model, traced, Degrees(dp=2), micro_batch=2)
    with pytest.raises(SpecError, match="3 rows do not divide into micro-batches of 2.*2 or 4 rows"):
        pm.step(hand_made.batch(rows=3), local=True)
    with pytest.raises(SpecError, match="missing: labels"):
        pm.step({"input_ids": hand_made.batch()["input_ids"]})
    with pytest.raises(AutoparError, match="cannot be moved or cast"):
        pm.float()
    pipelined = hand_made.parallel(model, traced, Degrees(pp=2))
    with pytest.raises(AutoparError, match="micro-batches only"):
        pipelined(**hand_made.batch())


@pytest.mark.distributed
def test_what_cannot_run_is_refused_with_the_reason() -> None:
    run_ranks(2, _refusals, timeout_s=60)


def test_one_process_trains_the_users_own_parameters() -> None:
    model = hand_made.build()
    losses, gradients, _ = _reference(model, [hand_made.batch()])
    pm = hand_made.parallel(model, hand_made.capture(model), Degrees())
    own = dict(model.named_parameters())
    assert all(p is own[name] for name, p in pm.named_parameters())
    assert pm.step(hand_made.batch()).item() == pytest.approx(losses[0], abs=1e-12)
    for name, gradient in gradients.items():
        _close(own[name].grad, gradient, name)
    assert own["unused"].grad is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: {**b, "labels": b["labels"][:, :4]}, "sequences of one length differ: input_ids 6, labels 4"),
        (lambda b: {**b, "input_ids": b["input_ids"][..., None]}, "input input_ids has 3 dims, captured with 2"),
    ],
)
def test_sizes_the_graph_was_not_captured_for_are_refused(change: Any, said: str) -> None:
    model, batch = hand_made.build(), hand_made.batch()
    pm = hand_made.parallel(model, hand_made.capture(model), Degrees())
    for run in (pm.step, lambda b: pm(**b)):
        with pytest.raises(SpecError, match=said):
            run(change(batch))


def test_narrower_integers_are_widened() -> None:
    model, batch = hand_made.build(), hand_made.batch()
    pm = hand_made.parallel(model, hand_made.capture(model), Degrees())
    narrow = {name: t.to(torch.int32) for name, t in batch.items()}
    assert torch.equal(pm.step(narrow), pm.step(batch))
