"""Which dims of a call are batch and sequence, and how tensors and arguments of a call get their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.binding import call_arguments, graph_names, invoke
from autopar.errors import SpecError, UnsupportedModelError
from autopar.input_dims import input_dims
from autopar.trace import trace
from tests.models import EncoderClassifier

IDS = torch.zeros(4, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("given", "has_rows", "sequence"),
    [
        (IDS, True, (1,)),
        (torch.zeros(4), True, ()),
        (torch.zeros(4, 6, 8), True, (1,)),
        (torch.zeros(4, 6, 6), True, (1,)),
        (torch.ones(4, 6, 6, dtype=torch.bool), True, (1, 2)),
        (torch.ones(4, 1, 6, dtype=torch.bool), True, (2,)),
        (torch.ones(4, 1, 1, 6), True, (3,)),
        (torch.ones(4, 1, 6, 6), True, (2, 3)),
        (torch.zeros(4, 3, 6, 6), True, ()),  # an image as large as the text is long
        (torch.zeros(4, 6, 5, 5), True, ()),  # with as many channels
        (torch.zeros(4, 9, 8), True, ()),  # a memory of another length
        (torch.arange(6), False, (0,)),
        (torch.arange(6)[None], False, (1,)),
        (torch.zeros(6, 6), False, (0, 1)),
        (torch.zeros(1, 2, 6, 6), False, (2, 3)),
        (torch.zeros(1), False, ()),
        (torch.zeros(9), False, ()),
        (torch.tensor(1.0), False, ()),
    ],
    ids=lambda x: str([*x.shape]) if isinstance(x, Tensor) else "",
)
@pytest.mark.parametrize("first", [True, False])
def test_dims(given: Tensor, has_rows: bool, sequence: tuple[int, ...], first: bool) -> None:
    inputs = {"x": given, "ids": IDS} if first else {"ids": IDS, "x": given}
    found = input_dims(inputs)["x"]
    assert (found.has_rows, found.sequence) == (has_rows, sequence)


def test_images_have_no_sequence() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.head = nn.Conv2d(8, 4, 2, 2), nn.Linear(4, 3)

        def forward(self, pixels: Tensor) -> Tensor:
            return self.head(self.patches(pixels).flatten(2).mean(2))

    traced = trace(Net(), torch.zeros(4, 8, 6, 6))
    assert traced.inputs[0].seq_dim is None
    assert traced.seq_range == (1, 1)


def test_an_input_that_may_have_been_misread_is_told() -> None:
    example = {"input_ids": torch.zeros(6, 6, dtype=torch.long), "offset": torch.arange(6)}

    class Net(EncoderClassifier):
        def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
            return super().forward(input_ids + offset)

    message = "input offset .6. was taken to have a row for each sequence; if it has none, use an example"
    with pytest.raises(UnsupportedModelError, match=message):
        trace(Net(), example)
    example["offset"] = torch.arange(6)[None]
    assert trace(Net(), example).inputs[1].batch_dim is None


def test_names_that_look_alike_stay_apart() -> None:
    names = graph_names(["d_ids", "d.ids", "row_ids", "class", "1.x", "d_ids_1"])
    assert names["d_ids"] == "d_ids"
    assert names["d_ids_1"] == "d_ids_1"
    assert len({*names.values(), "row_ids"}) == 7
    assert all(name.isidentifier() for name in names.values())


class Positions(nn.Module):
    """Takes arguments that have no names."""

    def forward(this, self: Tensor, /, scale: float = 1.0, *rest: Tensor, shift: float = 0.0) -> Any:  # noqa: N805
        return self * scale + sum(rest) + shift


def test_arguments_without_names_are_passed_by_position() -> None:
    one = torch.ones(4, 6)
    arguments = call_arguments(("self", "scale"), (one, 2.0, one, one), {"shift": 1.0}, "rest")
    assert list(arguments) == ["self", "scale", "rest", "shift"]
    assert invoke(Positions(), arguments)[0, 0] == 5
    with pytest.raises(SpecError, match="4 positional arguments for 2 parameters"):
        call_arguments(("self", "scale"), (one, 2.0, one, one), {})
    traced = trace(Positions(), [one, 2.0, one, one])
    assert traced.signature.tensors == ("self", "rest.0", "rest.1")
    batch = traced.signature.bind((one, 2.0, one, 5 * one), {})
    assert traced.graph_module(**batch)[0][0, 0] == 8
