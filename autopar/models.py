"""Where a model comes from: a preset name, `hf:PATH` (a local config.json) or `py:package.module:factory`.

Nothing is downloaded and no weights are read: a model is built from its configuration, on the meta device for planning.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import SpecError, nearest
from autopar.model_presets import PRESETS
from autopar.user_code import call_example, call_factory, load_factory, with_rows

__all__ = ["ModelSource", "example_from_config", "resolve"]

DEFAULT_BATCH, DEFAULT_SEQ = 2, 16


class Build(Protocol):
    def __call__(self, device: str = "meta") -> nn.Module: ...


class Example(Protocol):
    def __call__(self, batch: int | None = None, seq: int | None = None) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ModelSource:
    """A model by name.

    name         as the user wrote it
    build        `build(device="meta")` -> the module in training mode; on "cpu" with fresh weights from torch's seed
    example      `example(batch, seq)` -> keyword inputs on the CPU, labels among them; sizes left out are small ones.
                 Of a fixed example that the factory makes on meta only the shapes mean anything
    materialize  `materialize(multiple, seq)` -> the module and a real batch, both on the CPU: a fixed example keeps its
                 values and length, its rows are repeated up to a multiple of `multiple`
    kind         "hf" (a Hugging Face config) or "own" (the user's factory)
    max_seq_len  longest sequence a learned position table holds, None if the model sets no such limit
    """

    name: str
    build: Build
    example: Example
    materialize: Callable[[int, int], tuple[nn.Module, dict[str, Any]]]
    kind: str
    max_seq_len: int | None = None


def resolve(name: str) -> ModelSource:
    """The source `name` stands for. Raises SpecError for an unknown name, an unreadable path or a missing package."""
    scheme, colon, rest = name.partition(":")
    if colon and scheme == "hf":
        return _from_config(name, _read_config(name, rest))
    if colon and scheme == "py":
        return _from_factory(name, rest)
    if name not in PRESETS:
        raise SpecError(
            f"unknown model {name!r}",
            where="model",
            try_=f"{nearest(name, list(PRESETS))} (or hf:PATH, py:package.module:factory)",
        )
    return _from_config(name, PRESETS[name])


def example_from_config(config: Any, batch: int | None = None, seq: int | None = None) -> dict[str, Any]:
    """Token ids and labels for a Hugging Face language model; ids are int64 of shape (batch, seq), always the same."""
    generator = torch.Generator().manual_seed(1)
    shape = (batch or DEFAULT_BATCH, seq or DEFAULT_SEQ)
    vocab = config.get_text_config().vocab_size
    ids = torch.randint(1, vocab, shape, generator=generator, device="cpu")
    # A tensor of their own: one tensor passed twice would merge two inputs of the captured graph into one.
    return {"input_ids": ids, "labels": ids.clone()}


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def _read_config(name: str, path_text: str) -> dict[str, Any]:
    path = Path(path_text).expanduser()
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            f"cannot read the model's config: {error.strerror}",
            where=str(path),
            try_=f"the path of a local config.json or its folder, as in hf:path/to/config.json (got {name!r}; "
            "models are not downloaded)",
        ) from error
    except ValueError as error:
        raise SpecError(f"not JSON: {error}", where=str(path)) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise SpecError("no model_type in the config", where=str(path), try_="the config.json of a Hugging Face model")
    return values


def _from_config(name: str, values: Mapping[str, Any]) -> ModelSource:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise SpecError(
            "this model needs the package transformers", where=name, try_="pip install 'autopar[hf]'"
        ) from error
    arguments = dict(values)
    model_type = arguments.pop("model_type")
    try:
        config = AutoConfig.for_model(model_type, **arguments)
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(
            f"transformers cannot read this config: {_first_line(error)}",
            where=name,
            try_="a newer transformers, or py:package.module:factory for a model with its own code",
        ) from error
    _check_decoder_start(config, name)
    model_class = _class_with_loss(config, name)

    def build(device: str = "meta") -> nn.Module:
        with torch.device(device):
            model: nn.Module = model_class(copy.deepcopy(config))
        return model.train()

    def example(batch: int | None = None, seq: int | None = None) -> dict[str, Any]:
        return example_from_config(config, batch, seq)

    def materialize(multiple: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
        return build("cpu"), example(multiple, seq)

    return ModelSource(name, build, example, materialize, "hf", _learned_positions(config))


def _check_decoder_start(config: Any, name: str) -> None:
    """The decoder of an encoder-decoder reads its labels shifted by one, after this token."""
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        raise SpecError(
            "no decoder_start_token_id: what the decoder reads first is not known", where=name,
            try_='"decoder_start_token_id" in the config (T5: the pad_token_id, 0)',
        )  # fmt: skip


def _class_with_loss(config: Any, name: str) -> Any:
    """The class named by the config's `architectures`, or the head that trains this kind of model."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    causal, masked, seq2seq = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    kind = config.model_type
    choices = [str(table[kind]) for table in (seq2seq, masked, causal) if kind in table]
    named = (config.architectures or [None])[0]
    if named is not None and named not in choices:
        raise SpecError(
            f"{named} has no language-model loss to train on",
            where=name,
            try_=f"architectures [{choices[0]!r}] in the config" if choices else "py:package.module:factory",
        )
    if not choices:
        raise SpecError(f"{kind} models have no language-model head", where=name, try_="py:package.module:factory")
    if named is None and getattr(config, "is_decoder", False) and kind in causal:
        named = str(causal[kind])
    return getattr(transformers, named or choices[0])


def _learned_positions(config: Any) -> int | None:
    """Length of the position table. Rotary models compute positions, so their maximum is advice, not a limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None)
    return None if rotary or not isinstance(limit, int) else limit


# --- the user's own code ----------------------------------------------------------------------------------------------


def _from_factory(name: str, path: str) -> ModelSource:
    factory = load_factory(name, path)

    def build(device: str = "meta") -> nn.Module:
        return call_factory(factory, name, device)[0].train()

    def inputs(module: nn.Module, given: Any, batch: int | None, seq: int | None) -> dict[str, Any]:
        if callable(given):
            return call_example(given, batch or DEFAULT_BATCH, seq or DEFAULT_SEQ, name)
        if given is not None:
            return with_rows(given, batch, seq, name)
        if hasattr(getattr(module, "config", None), "get_text_config"):
            return example_from_config(module.config, batch, seq)
        raise SpecError(
            "the factory returns no example inputs, and they cannot be derived from the model",
            where=name,
            try_="return (module, example): example(batch, seq) -> dict of keyword inputs",
        )

    def example(batch: int | None = None, seq: int | None = None) -> dict[str, Any]:
        return inputs(*call_factory(factory, name, "meta"), batch, seq)

    def materialize(multiple: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
        module, given = call_factory(factory, name, "cpu")
        if given is None or callable(given):
            return module.train(), inputs(module, given, multiple, seq)
        batch = with_rows(given, None, None, name)
        rows = next((t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.ndim), 1)
        return module.train(), with_rows(batch, max(1, math.ceil(rows / multiple)) * multiple, None, name)

    return ModelSource(name, build, example, materialize, "own")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
