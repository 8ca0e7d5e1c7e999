"""A model that cannot be captured: module path and source line of the user's, and nothing printed beside it."""

from __future__ import annotations

import inspect
import logging
import sys

import pytest
import torch
from torch import Tensor, nn

from autopar.capture_errors import export_is_quiet
from autopar.errors import UnsupportedModelError
from autopar.trace import trace


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def counting(x: Tensor) -> Tensor:
    return x[:, : int(x.max().item())]


def breaking(x: Tensor) -> Tensor:
    raise IndexError("a fault of the user's")


class Net(nn.Module):
    """Calls one of the above inside `inner.gate`; `this` is what others call self."""

    def __init__(this, function: object) -> None:  # noqa: N805
        super().__init__()
        this.inner = nn.ModuleDict({"gate": Gate(function)})
        this.linear = nn.Linear(4, 4)

    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        return this.inner["gate"](this.linear(x)).mean()


class Gate(nn.Module):
    def __init__(this, function: object) -> None:  # noqa: N805
        super().__init__()
        this.function = function

    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        return this.function(x)  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (branching, "control flow depends on tensor values"),
        (counting, "control flow depends on tensor values"),
        (breaking, "IndexError: a fault of the user's"),
    ],
)
def test_the_users_line_is_named_and_torch_prints_nothing(
    function: object, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        trace(Net(function), {"x": torch.ones(2, 4)})
    text = str(caught.value)
    line = inspect.getsourcelines(function)[1] + 1  # type: ignore[arg-type]
    assert text.startswith("inner.gate: cannot be captured: ")
    assert says in text
    assert f"test_capture_errors.py:{line})" in text
    assert capfd.readouterr() == ("", "")


def test_warnings_of_torch_come_back_afterwards() -> None:
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    torch_log = logging.getLogger("torch.export")
    torch_log.addHandler(handler)
    try:
        with export_is_quiet():
            torch_log.warning("not now")
            torch_log.error("but this")
        torch_log.warning("again")
    finally:
        torch_log.removeHandler(handler)
    assert shown == ["but this", "again"]


def test_what_the_user_prints_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with export_is_quiet():
        print("mine", file=sys.stderr)
    assert capsys.readouterr().err == "mine\n"
