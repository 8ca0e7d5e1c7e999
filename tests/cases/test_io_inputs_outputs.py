"""Field cases io-01 to io-05: arguments by name, the user's output types, masks by row, constants of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.build import build
from autopar.errors import AutoparError, SpecError, UnsupportedModelError
from autopar.mesh import Degrees
from autopar.passes import apply, prepare
from autopar.plan import Plan
from autopar.runtime.engine import ParallelModule
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests.models import BUILDERS, default_batch, llama_tiny

DIM, VOCAB = 16, 64
CLUSTER = "local:2"
TRAIN = autopar.TrainSpec(global_batch=8, seq_len=16, precision="fp64")


def parallel(model: nn.Module, batch: Any, loss_fn: Any = None, **pins: Any) -> ParallelModule:
    cluster = autopar.ClusterSpec.parse(CLUSTER)
    pinned = autopar.Pins(microbatch=2, **pins)
    return autopar.parallelize(model, cluster, TRAIN, example=batch, loss_fn=loss_fn, pins=pinned)


def worst(found: Mapping[str, Tensor | None], model: nn.Module) -> float:
    """Largest difference of gathered gradients from the model's own, relative to each tensor."""
    errors = [
        float((found[n] - p.grad).abs().max() / p.grad.abs().max().clamp(min=1e-3))  # type: ignore[operator]
        for n, p in model.named_parameters()
        if p.grad is not None
    ]
    return max(errors)


def padded_batch() -> dict[str, Tensor]:
    """Rows padded to different lengths, with masks of their own and no label on padding."""
    batch = default_batch()
    lengths = torch.tensor([16, 3, 9, 12, 5, 16, 7, 10])
    mask = (torch.arange(16)[None, :] < lengths[:, None]).long()
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def _reordered_and_masked(pins: dict[str, Any]) -> list[float]:
    model, batch = llama_tiny(), padded_batch()
    pm = parallel(model, batch, **pins)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    errors = []
    for order in (list(batch), list(batch)[::-1], ["labels", "input_ids", "attention_mask"]):
        pm.zero_grad()
        errors.append(abs(float(pm.step({name: batch[name] for name in order})) - float(loss)))
        errors.append(worst(pm.full_gradients(), model))
    return errors


@pytest.mark.distributed
@pytest.mark.parametrize("pins", [{"pp": 2}, {"tp": 2}, {"dp": 2}])
def test_io_01_io_03_arguments_bind_by_name_and_every_row_has_its_own_mask(pins: dict[str, Any]) -> None:
    for errors in run_ranks(2, _reordered_and_masked, pins):
        assert max(errors) < 1e-6


def _output_types(family: str, pins: dict[str, Any]) -> dict[str, Any]:
    model, batch = BUILDERS[family](), default_batch()
    pm = parallel(model, batch, **pins)
    wanted = model(**batch) if family == "bert" else model(**batch, use_cache=False)
    try:
        out = pm(**batch)
    except AutoparError as error:
        return {"refused": str(error)}
    return {
        "type": type(out) is type(wanted),
        "keys": list(out.keys()) == [k for k in wanted.keys() if k != "past_key_values"],  # noqa: SIM118
        "loss": abs(float(out.loss) - float(wanted.loss)),
        "logits": float((out.logits - wanted.logits).abs().max()),
        "by name": torch.equal(out["logits"], out.logits),
        "by index": torch.equal(out[0], out.loss),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("pins", [{"tp": 2}, {"dp": 2}])
def test_io_02_outputs_have_the_users_type(family: str, pins: dict[str, Any]) -> None:
    for found in run_ranks(2, _output_types, family, pins):
        assert found["type"]
        assert found["keys"]
        assert found["by name"]
        assert found["by index"]
        assert max(found["loss"], found["logits"]) < 1e-6


@pytest.mark.distributed
def test_io_02_outputs_of_a_pipeline_are_refused_and_not_wrong() -> None:
    for found in run_ranks(2, _output_types, "gpt2", {"pp": 2}):
        assert "a pipelined model runs by micro-batches only. Try: pm.step(batch)" in found["refused"]


class Packed(nn.Module):
    """Takes offsets of documents in the whole batch, laid end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)) for _ in range(2)])

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        documents = torch.bucketize(torch.arange(ids.numel()), offsets[1:-1], right=True).view_as(ids)
        x = self.embed(ids) + documents[..., None]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def test_io_03_offsets_of_the_whole_batch_cannot_be_cut() -> None:
    """The offsets go whole to every part; what is made of them numbers the rows of the whole batch."""
    example = {"ids": torch.zeros(2, 6, dtype=torch.long), "offsets": torch.tensor([0, 4, 6, 7, 12])}
    traced = prepare(trace(Packed(), example))
    assert "input offsets [5] has no row for each sequence: every part of a batch reads it whole" in traced.notices
    layers = tuple(s.path for s in traced.layers)
    plan = Plan(degrees=Degrees(dp=2), global_batch=2, seq_len=6, micro_batch=1, stages=(layers,))
    with pytest.raises(UnsupportedModelError, match="arange numbers the rows of a batch"):
        apply(traced, plan)


class Constants(nn.Module):
    """Every kind of argument a user may have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)) for _ in range(2)])
        self.bias = nn.Parameter(torch.ones(DIM))

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        use_bias: bool = True,
        scale: int = 2,
        mode: str = "train",
        extra: list[Tensor] | None = None,
        options: dict[str, Any] | None = None,
    ) -> Tensor:
        x = self.embed(ids) * scale
        if use_bias:
            x = x + self.bias
        for tensor in extra or ():
            x = x + tensor[..., None]
        for layer in self.layers:
            x = x + layer(x)
        if mask is not None:
            x = x * mask[..., None]
        temperature = 1.0 if options is None else options["temperature"]
        logits = self.head(x) / temperature
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return loss if mode == "train" else loss * 2


def _calls() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    ids = default_batch()["input_ids"]
    extra = [torch.rand(8, 16, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [
        {"ids": ids},
        {"ids": ids, "use_bias": False, "scale": 3, "mode": "double", "mask": None},
        {"extra": extra, "ids": ids, "mask": extra[0].round()},
        {"ids": ids, "options": {"temperature": 2.0, "name": None}, "extra": extra[:1]},
    ]


def _constants() -> list[float]:
    errors = []
    for call in _calls():
        torch.manual_seed(0)
        model = Constants().double()
        pm = parallel(model, call, pp=2)
        loss = model(**call)
        loss.backward()
        errors += [abs(float(pm.step(call)) - float(loss)), worst(pm.full_gradients(), model)]
    return errors


@pytest.mark.distributed
def test_io_05_constants_none_and_lists_have_parity() -> None:
    for errors in run_ranks(2, _constants):
        assert max(errors) < 1e-10


@pytest.mark.parametrize(
    ("captured", "now", "says"),
    [
        ({"scale": 3}, {"scale": 4}, "'scale' was captured as 3 and is now 4"),
        ({"scale": 3}, {}, "'scale' was captured as 3 and is now 2"),  # forward's default
        ({}, {"scale": 3}, "'scale' was captured as 2 and is now 3"),
        ({}, {"mode": "double"}, "'mode' was captured as 'train' and is now 'double'"),
        ({"use_bias": True}, {"use_bias": 1}, "'use_bias' was captured as True and is now 1"),
        ({"mask": torch.ones(8, 16)}, {}, "missing: mask"),
        ({}, {"mask": torch.ones(8, 16)}, "not captured: mask"),
        ({"extra": [torch.ones(8, 16)]}, {"extra": [torch.ones(8, 16)] * 2}, "not captured: extra.1"),
        ({"options": {"temperature": 2.0}}, {"options": {"temperature": 3.0}}, "'options.temperature' was captured"),
        ({"options": {"temperature": 2.0}}, {}, "'options.temperature' was captured as 2.0 and is now not given"),
        ({}, {"scale": torch.ones(())}, "'scale' was captured as 2 and is now a tensor"),
    ],
)
def test_io_05_what_changed_is_named(captured: dict[str, Any], now: dict[str, Any], says: str) -> None:
    ids = default_batch()["input_ids"]
    signature = trace(Constants(), {"ids": ids, **captured}).signature
    signature.bind((), {"ids": ids, **captured})
    with pytest.raises(SpecError, match=says):
        signature.bind((), {"ids": ids, **now})


def test_io_05_forwards_own_defaults_may_be_given() -> None:
    ids = default_batch()["input_ids"]
    signature = trace(Constants(), {"ids": ids}).signature
    assert list(signature.bind((), {"scale": 2, "mask": None, "mode": "train", "ids": ids})) == ["ids"]


class Logits(nn.Module):
    """Returns several things and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Constants()

    def forward(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.inner.embed(ids)
        for layer in self.inner.layers:
            x = x + layer(x)
        return self.inner.head(x), {"states": x, "first": x[:, 0]}


def _mean(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(outputs[0].flatten(0, 1), batch["target"].flatten(), label_smoothing=batch["smoothing"])


def _counted(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A sum over a number that the batch brings along."""
    loss = F.cross_entropy(outputs[0].flatten(0, 1), batch["target"].flatten(), reduction="sum")
    return loss / batch["num_items_in_batch"]


def _outside(loss_fn: Callable[..., Tensor], pins: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model, ids = Logits().double(), default_batch()["input_ids"]
    errors: list[float] = []
    pm = None
    for count in (100, 70):
        batch = {"ids": ids, "target": ids.roll(1, 1), "smoothing": 0.1, "num_items_in_batch": torch.tensor(count)}
        if loss_fn is _mean:
            batch["target"] = batch["target"].masked_fill(ids > count // 2, -100)
            del batch["num_items_in_batch"]
        pm = pm or parallel(model, batch, loss_fn, **pins)
        model.zero_grad()
        pm.zero_grad()
        loss = loss_fn(model(ids), batch)
        loss.backward()
        errors += [abs(float(pm.step(batch)) - float(loss)), worst(pm.full_gradients(), model)]
    return errors


@pytest.mark.distributed
@pytest.mark.parametrize("loss_fn", [_mean, _counted])
@pytest.mark.parametrize("pins", [{"pp": 2}, {"dp": 2}])
def test_a_loss_outside_the_model_over_several_outputs(loss_fn: Callable[..., Tensor], pins: dict[str, Any]) -> None:
    for errors in run_ranks(2, _outside, loss_fn, pins):
        assert max(errors) < 1e-10


def test_num_items_in_batch_of_a_hugging_face_model_is_a_number_of_the_batch() -> None:
    model, batch = llama_tiny(), {**default_batch(), "num_items_in_batch": torch.tensor(100)}
    traced = prepare(trace(model, batch))
    plan = Plan(
        degrees=Degrees(), global_batch=8, seq_len=16, micro_batch=2, stages=(tuple(s.path for s in traced.layers),),
        precision="fp64",
    )  # fmt: skip
    pm = build(model, traced, plan)
    for count in (100, 70):
        batch["num_items_in_batch"] = torch.tensor(count)
        wanted = model(**batch, use_cache=False).loss
        assert torch.isclose(pm.step(batch).to(wanted.dtype), wanted, rtol=1e-6)
