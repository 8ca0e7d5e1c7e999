"""Field case tr-03: training and evaluation mode are two programs, whichever the model was in when it was captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime.launch import run_ranks
from tests.models import default_batch, tiny_gpt

DIM, VOCAB, P = 32, 64, 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.up(x), P, training=self.training)
        h = h + 0.25 if self.training else h.tanh() * 3.0
        y: Tensor = x + self.down(h)
        return y


class Model(nn.Module):
    """Has a head that is used in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head, self.calm_head = nn.Linear(DIM, VOCAB), nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x) if self.training else self.calm_head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.training:
            loss = loss + 0.1 * logits.pow(2).mean()  # a term that evaluation does not have
        return {"loss": loss, "logits": logits}


def _modes(start_in_training: bool, pins: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    model, batch = Model().double().train(start_in_training), default_batch()
    train = autopar.TrainSpec(global_batch=8, seq_len=16, precision="fp64")
    cluster = autopar.ClusterSpec.parse("local:2")
    pm = autopar.parallelize(model, cluster, train, example=batch, pins=autopar.Pins(**pins))
    assert pm.training == start_in_training
    model.eval()
    expected = model(**batch)
    reference = expected["logits"].detach()
    found: dict[str, float] = {}
    for name in ("first", "again"):
        quiet = pm.eval()(**batch)["logits"]
        assert torch.equal(quiet, pm(**batch)["logits"])
        assert torch.isclose(pm(**batch)["loss"], expected["loss"], rtol=1e-12, atol=0)
        found[f"{name} eval"] = float((quiet - reference).abs().max())
        loud = [pm.train()(**batch)["logits"] for _ in range(2)]
        found[f"{name} train"] = float((loud[0] - loud[1]).abs().max())  # another mask each time
        with pytest.raises(AutoparError, match="other code in evaluation mode"):
            pm.eval().step(batch)
        loss = pm.train().step(batch)
        assert torch.isfinite(loss)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("start_in_training", [True, False])
@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}])
def test_tr_03_eval_is_quiet_and_train_drops(start_in_training: bool, pins: dict[str, Any]) -> None:
    for found in run_ranks(2, _modes, start_in_training, pins):
        for name in ("first", "again"):
            assert found[f"{name} eval"] < 1e-10
            assert found[f"{name} train"] > 1e-2


def test_tr_03_step_in_evaluation_mode_only_leaves_out_dropout() -> None:
    torch.manual_seed(0)
    model, batch = tiny_gpt(), default_batch()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = P
    train = autopar.TrainSpec(global_batch=8, seq_len=16, precision="fp64")
    pm = autopar.parallelize(model, autopar.ClusterSpec.parse("local:1"), train, example=batch)
    assert torch.isclose(pm.eval().step(batch), model.eval()(**batch), atol=1e-12)


def _dropout_in_the_plan() -> tuple[bool, float]:
    """A plan that places the outputs of dropout, which the evaluation graph does not have."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": DIM, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).double().train()
    train = autopar.TrainSpec(global_batch=8, seq_len=16, precision="fp64")
    pm = autopar.parallelize(model, autopar.ClusterSpec.parse("local:2"), train, pins=autopar.Pins(tp=2, sp=True))
    batch = default_batch()
    quiet = pm.eval()(**batch).logits
    placed = any("dropout" in key for key in pm.plan.ops)
    return placed, float((quiet - model.eval()(**batch, use_cache=False).logits).abs().max().detach())


@pytest.mark.distributed
def test_tr_03_neighbour_a_plan_that_places_dropout_evaluates() -> None:
    for placed, error in run_ranks(2, _dropout_in_the_plan):
        assert placed
        assert error < 1e-6
