"""Model sources: presets have their published sizes, every wrong name gets one clear answer."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import SpecError
from autopar.model_presets import PRESETS
from autopar.models import resolve


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2-7b", 6.738),
        ("llama2-13b", 13.016),
        ("llama2-70b", 68.977),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.554),
        ("llama3-405b", 405.853),
        ("gpt2", 0.1244),
        ("gpt3-175b", 174.6),
        ("gpt-1t", 1008.0),
        ("bert-large", 0.3352),
        ("qwen2-7b", 7.616),
        ("mistral-7b", 7.248),
    ],
)
def test_preset_has_its_published_parameter_count(name: str, billions: float) -> None:
    model = resolve(name).build()
    assert model.training
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
def test_tiny_preset_trains_on_its_example(name: str) -> None:
    source = resolve(name)
    batch = source.example(3, 8)
    assert batch["input_ids"].shape == (3, 8)
    assert batch["input_ids"] is not batch["labels"]
    loss = source.build(device="cpu")(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_only_learned_positions_limit_the_sequence() -> None:
    assert resolve("gpt2").max_seq_len == 1024
    assert resolve("bert-large").max_seq_len == 512
    assert resolve("llama3-8b").max_seq_len is None


def test_hf_path_is_a_config_or_its_folder(tmp_path: Path) -> None:
    values = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "use_cache": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for path in (tmp_path, tmp_path / "config.json"):
        model = resolve(f"hf:{path}").build()
        assert type(model).__name__ == "GPT2LMHeadModel"
        assert model.config.use_cache is True  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("BertForMaskedLM", "BertForMaskedLM"), ("BertLMHeadModel", "BertLMHeadModel"), (None, "BertForMaskedLM")],
)
def test_architectures_choose_the_head(tmp_path: Path, architecture: str | None, expected: str) -> None:
    values: dict[str, Any] = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    if architecture:
        values["architectures"] = [architecture]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert type(resolve(f"hf:{tmp_path}").build()).__name__ == expected


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lama3-8b", "did you mean 'llama3-8b'"),
        ("hf:/nowhere/at/all", "cannot read the model's config"),
        ("hf:{tmp}/broken.json", "not JSON"),
        ("hf:{tmp}/list.json", "no model_type"),
        ("hf:{tmp}/unknown.json", "transformers cannot read this config"),
        ("hf:{tmp}/base.json", "BertModel has no language-model loss"),
        ("py:no_such_module_here:make", "no module 'no_such_module_here'"),
        ("py:json", "not of the form"),
        ("py:json:dump_it", "did you mean 'dumps'|did you mean 'dump'"),
        ("py:builtins:dict", "returned dict"),
    ],
)
def test_wrong_names_are_refused_in_one_line(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "unknown.json").write_text('{"model_type": "nothing-like-it"}')
    (tmp_path / "base.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(SpecError, match=says) as caught:
        resolve(name.format(tmp=tmp_path)).build()
    assert "\n" not in str(caught.value)


def test_an_encoder_decoder_needs_its_first_token(tmp_path: Path) -> None:
    """T5's default config has none, and its forward needs it to shift the labels."""
    sizes = {
        "model_type": "t5",
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 4,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(SpecError, match="no decoder_start_token_id"):
        resolve(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"decoder_start_token_id": 0}))
    source = resolve(f"hf:{tmp_path}")
    assert torch.isfinite(source.build(device="cpu")(**source.example(2, 8)).loss)


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_transformers(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("transformers"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_transformers)
    with pytest.raises(SpecError, match=r"autopar\[hf\]"):
        resolve("llama3-8b")


OWN_MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(16, 4)

    def forward(self, ids):
        return self.table(ids).sum()

def plain():
    return Net()

def with_inputs():
    return Net(), {"ids": torch.randint(0, 16, (2, 5))}

def with_function():
    return Net(), lambda batch, seq: {"ids": torch.zeros(batch, seq, dtype=torch.long)}
"""


def test_factory_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model_for_test.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    source = resolve("py:own_model_for_test:with_function")
    assert source.kind == "own"
    assert source.build().table.weight.is_meta  # type: ignore[union-attr]
    assert source.example(3, 7)["ids"].shape == (3, 7)

    fixed = resolve("py:own_model_for_test:with_inputs")
    ids = fixed.example(5)["ids"]
    assert ids.shape == (5, 5)
    assert not ids.is_meta
    fixed.build(device="cpu")(ids)
    with pytest.raises(SpecError, match="sequence length 5, 9 is asked for"):
        fixed.example(5, 9)
    with pytest.raises(SpecError, match="no example inputs"):
        resolve("py:own_model_for_test:plain").example()


def test_every_preset_is_a_plain_config() -> None:
    assert all(json.loads(json.dumps(dict(values))) == values for values in PRESETS.values())
