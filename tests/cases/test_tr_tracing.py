"""Field cases tr-01, tr-02, tr-10: capture without touching the config, without an allow-list, and at full size."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import SpecError, UnsupportedModelError
from autopar.passes import prepare
from autopar.trace import trace
from tests.models import BUILDERS, HF_BUILDERS, default_batch, llama_tiny


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "mistral", "t5"])
def test_tr_01_capture_leaves_the_config_alone(family: str) -> None:
    model: Any = BUILDERS[family]()
    assert model.config.use_cache
    before = copy.deepcopy(model.config.to_dict())
    assert trace(model, default_batch()).loss == 0
    assert model.config.to_dict() == before


def _gemma() -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    torch.manual_seed(0)
    return GemmaForCausalLM(
        GemmaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        )
    )  # fmt: skip


def _olmo() -> nn.Module:
    from transformers import OlmoConfig, OlmoForCausalLM

    torch.manual_seed(0)
    return OlmoForCausalLM(
        OlmoConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


@pytest.mark.parametrize("build", [*HF_BUILDERS.values(), _gemma, _olmo])
def test_tr_02_captured_graph_reproduces_the_logits(build: Any) -> None:
    model = build().train()
    traced = prepare(trace(model, default_batch()))
    batch = default_batch(rows=5, seq=13, seed=3)
    wanted = model(**batch, use_cache=False).logits
    outputs = traced.graph_module(*traced.signature.bind((), batch).values())
    assert torch.equal(outputs[traced.outputs.index("logits")], wanted)


_LLAMA_8B = """
import json, resource, sys
from autopar.cost_model.search import search
from autopar.models import resolve
from autopar.errors import SpecError, UnsupportedModelError
from autopar.passes import prepare
from autopar.specs import ClusterSpec, TrainSpec
from autopar.trace import trace

source = resolve("llama3-8b")
model = source.build("meta")
traced = prepare(trace(model, source.example(2, 8192)))
found = search(traced, ClusterSpec.parse("dgx-h100:8"), TrainSpec(global_batch=128, seq_len=8192))
assert all(p.is_meta for p in model.parameters())
assert len(traced.layers) == 32
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"peak": peak, "capture_s": traced.capture_s, "world": found.plan.degrees.world_size}))
"""


@pytest.mark.slow
def test_tr_10_llama_3_8b_is_planned_from_meta() -> None:
    import json

    done = subprocess.run([sys.executable, "-c", _LLAMA_8B], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["world"] == 64
    assert result["peak"] < 4e9


def test_tr_01_caches_are_told_and_not_taken() -> None:
    """A cache that forward wrote into during the capture would hold tensors without data afterwards."""
    from transformers import DynamicCache

    model, batch = llama_tiny(), default_batch()
    model.config.use_cache = True
    assert any("no key/value cache is built here" in notice for notice in trace(model, batch).notices)
    cache = DynamicCache()
    for name in ("cache", "past_key_values"):
        with pytest.raises(SpecError, match=f"{name} is given"):
            trace(model, {**batch, name: cache})
    assert cache.get_seq_length() == 0
    with pytest.raises(UnsupportedModelError, match="key/value cache"):
        trace(model, {**batch, "use_cache": True})
