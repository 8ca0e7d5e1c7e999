"""Field case io-05: a call that differs in what is no tensor is a program of its own, over the same parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, SpecError
from autopar.runtime.launch import run_ranks
from autopar.runtime.programs import MOST_PROGRAMS
from tests.cases.test_io_inputs_outputs import worst
from tests.models import VOCAB, default_batch

pytestmark = pytest.mark.distributed
DIM = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.extra_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 64), nn.Linear(64, DIM)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, mask: Tensor | None, scale: int, p: float) -> Tensor:
        self.calls += 1
        n = self.norm(x)
        q, k, v = (proj(n).unflatten(-1, (4, 8)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        allowed = None if mask is None else mask[:, None, None, :] & torch.ones(x.shape[1], x.shape[1]).tril().bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=mask is None)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), p, self.training) * scale
        n = self.extra_norm(x) if scale > 1 else x  # parameters that some calls do not read
        return x + self.down(F.gelu(self.up(n)))


class Model(nn.Module):
    """The head is tied, but only in one mode read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.other_head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([Block() for _ in range(2)])

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        scale: int = 2,
        mode: str = "both",
        extra: list[Tensor] | None = None,
        p: float = 0.0,
    ) -> dict[str, Tensor]:
        x = self.embed(ids)
        for tensor in extra or ():
            x = x + tensor[..., None]
        for layer in self.layers:
            x = layer(x, mask, scale, p)
        logits = self.other_head(x)
        if mode == "both":
            logits = logits + F.linear(x, self.embed.weight)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _calls() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    ids = default_batch()["input_ids"]
    labels = ids.masked_fill(torch.rand(8, 16, generator=generator) < 0.3, -100)
    given = {"ids": ids, "labels": labels}
    rows = torch.rand(8, 16, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([16, 3, 9, 12, 5, 16, 7, 10])
    mask = torch.arange(16)[None] < lengths[:, None]
    return [
        given,
        {**given, "scale": 1},
        {**given, "mask": mask, "scale": 2},
        {**given, "mode": "one", "extra": [rows, rows.flip(0)]},
        {**given, "mode": "both"},  # forward's default: the first program
        {**given, "scale": 1},
    ]


def _parallel(pins: Mapping[str, Any], example: Mapping[str, Any]) -> tuple[Model, autopar.ParallelModule]:
    torch.manual_seed(0)
    model = Model().double()
    cluster = autopar.ClusterSpec.parse(f"local:{dist.get_world_size()}")
    train = autopar.TrainSpec(global_batch=8, seq_len=16, precision="fp64")
    return model, autopar.parallelize(model, cluster, train, example=example, pins=autopar.Pins(**pins))


def _training(pins: dict[str, Any]) -> dict[str, Any]:
    calls = [call for call in _calls() if "cp" not in pins or "mask" not in call]
    found: dict[str, Any] = {"errors": []}
    model, pm = _parallel(pins, calls[0])
    for cls, options in ((torch.optim.SGD, {"lr": 0.1}), (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3})):
        mine, plain = pm.optimizer(cls, **options), cls(model.parameters(), **options)  # type: ignore[arg-type]
        for call in calls:
            mine.zero_grad()
            plain.zero_grad()
            loss = model(**call)["loss"]
            loss.backward()
            found["errors"] += [float((pm.step(call) - loss).abs().detach()), worst(pm.full_gradients(), model)]
            held = dict(pm.named_parameters())
            unread = [n for n, p in model.named_parameters() if p.grad is None and n in held]
            assert all(held[n].grad is None for n in unread)  # an optimizer would decay what has a gradient of zeros
            assert unread or call.get("scale") != 1
            mine.step()
            plain.step()
        state = pm.state_dict()
        found["errors"] += [float((state[n] - p).abs().max().detach()) for n, p in model.named_parameters()]
    found["captured"] = [notice for notice in pm.notices if "captured again" in notice]
    found["calls"] = int(state["layers.0.calls"]) // pm.plan.micro_batches
    if "pp" not in pins:  # without labels: logits
        quiet = pm.eval()(ids=calls[0]["ids"])["logits"]
        found["errors"].append(float((quiet - model(ids=calls[0]["ids"])["logits"]).abs().max().detach()))
        pm.train()
    with pytest.raises(AutoparError, match="missing: labels|returns no loss for this batch"):
        pm.step({"ids": calls[0]["ids"]})
    return found


@pytest.mark.parametrize(
    "pins",
    [
        {"pp": 2, "microbatch": 2},
        {"tp": 2, "sp": True},
        {"cp": 2, "zero": 0},
        {"dp": 2, "microbatch": 2, "zero": 1},
        {"dp": 2, "microbatch": 2, "zero": 3, "checkpoint": "full"},
    ],
    ids=str,
)
def test_io_05_every_kind_of_call_trains_as_in_one_process(pins: dict[str, Any]) -> None:
    for found in run_ranks(2, _training, pins):
        assert max(found["errors"]) < 1e-10
        assert len(found["captured"]) == (2 if "cp" in pins else 3)  # each kind once
        assert "'scale' was captured as 2 and is now 1: captured again" in found["captured"][0]
        assert found["calls"] == 2 * (5 if "cp" in pins else 6)  # buffers are shared


def _dropped(pins: dict[str, Any]) -> list[float]:
    """Losses of steps in turns of two programs, both of which drop."""
    calls = _calls()
    _, pm = _parallel(pins, {**calls[0], "p": 0.5})
    return [float(pm.step({**calls[i], "p": 0.5})) for i in (0, 1, 0, 1)]


def test_io_05_masks_go_on_from_program_to_program() -> None:
    alone = run_ranks(1, _dropped, {})[0]
    assert len(set(alone)) == 4
    for pins in ({"tp": 2}, {"dp": 2, "microbatch": 4}):
        for losses in run_ranks(2, _dropped, pins):
            assert losses == pytest.approx(alone, rel=1e-12)


def _refusals() -> list[str]:
    calls = _calls()
    said = []

    def refused(pm: autopar.ParallelModule, batch: Mapping[str, Any], local: bool = False) -> None:
        with pytest.raises(SpecError) as error:
            pm.step(batch, local=local)
        said.append(str(error.value))

    _, pm = _parallel({"dp": 2}, calls[0])
    own = {name: t.chunk(2)[dist.get_rank()] for name, t in calls[0].items()}
    refused(pm, {**own, "scale": 1 + dist.get_rank()}, local=True)
    refused(pm, {**calls[0], "scal": 1})
    for wrong in ({"scale": 1 + dist.get_rank()}, {n: t[:, : 16 - dist.get_rank()] for n, t in calls[0].items()}):
        refused(_parallel({"dp": 2}, calls[0])[1], {**calls[0], **wrong})
    _, pm = _parallel({"dp": 2}, {**calls[0], "scale": 1})
    refused(pm, calls[0])
    for i in range(MOST_PROGRAMS - 1):
        pm.step({**calls[0], "scale": -i})
    refused(pm, {**calls[0], "scale": -100})
    return said


def test_io_05_calls_without_a_program_are_refused_on_every_rank() -> None:
    for said in run_ranks(2, _refusals):
        assert "in different ways; rank 0: argument 'scale' was captured as 2 and is now 1" in said[0]
        assert "'scal' was not there when the model was captured" in said[1]
        assert "in different ways; rank 0: argument 'scale' was captured as 2 and is now 1" in said[2]
        assert "in different ways; rank 0: ids [8, 16], labels [8, 16]; rank 1: ids [8, 15], labels [8, 15]" in said[3]
        assert "'scale' was captured as 1 and is now 2" in said[4]
        assert "extra_norm.weight is trained by this call, and was not read before" in said[4]
        assert f"{MOST_PROGRAMS} kinds of calls have a captured program each" in said[5]
        assert "a tensor for what changes" in said[5]
