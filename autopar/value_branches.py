"""Branches of torch's own modules that look at values of a tensor, decided without a look while a model is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.nn.modules import transformer

__all__ = ["masks_unread"]


@contextlib.contextmanager
def masks_unread() -> Iterator[None]:
    """Within: nn.TransformerEncoder and nn.TransformerDecoder apply the mask they are given, and do not compare it with
    a causal one to leave it to the kernel. The values are the same; `fold_masks` finds out later what the mask is."""

    def is_stated(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with mock.patch.object(transformer, "_detect_is_causal_mask", is_stated):
        yield
