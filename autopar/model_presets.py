"""Shapes of well-known models, as arguments of their Hugging Face configs. Data only.

Sources: the models' published config.json files; gpt3-175b and gpt-1t the shapes of the Megatron-LM papers (vocabulary
padded to 51,200, no dropout). The tiny ones are ours: byte vocabulary, small enough for two cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PRESETS"]


def _llama(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, positions: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
    }


def _gpt(vocab: int, hidden: int, layers: int, heads: int, positions: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": vocab,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama2-7b": _llama(32000, 4096, 11008, 32, 32, 32, 4096),
    "llama2-13b": _llama(32000, 5120, 13824, 40, 40, 40, 4096),
    "llama2-70b": _llama(32000, 8192, 28672, 80, 64, 8, 4096),
    "llama3-8b": {**_llama(128256, 4096, 14336, 32, 32, 8, 8192), "rope_theta": 500000.0},
    "llama3-70b": {**_llama(128256, 8192, 28672, 80, 64, 8, 8192), "rope_theta": 500000.0},
    "llama3-405b": {**_llama(128256, 16384, 53248, 126, 128, 8, 131072), "rope_theta": 500000.0},
    "qwen2-7b": {
        **_llama(152064, 3584, 18944, 28, 28, 4, 32768),
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    # The shape of v0.3, which dropped the sliding window of v0.1.
    "mistral-7b": {
        **_llama(32768, 4096, 14336, 32, 32, 8, 32768),
        "model_type": "mistral",
        "sliding_window": None,
        "rope_theta": 1000000.0,
    },
    # The published config, dropout 0.1 included.
    "gpt2": {"model_type": "gpt2"},
    "gpt3-175b": _gpt(51200, 12288, 96, 96, 2048),
    "gpt-1t": _gpt(51200, 25600, 128, 160, 2048),
    "bert-large": {
        "model_type": "bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "llama-tiny": _llama(256, 64, 192, 4, 4, 4, 256),
    "gpt-tiny": _gpt(256, 64, 4, 4, 256),
}
