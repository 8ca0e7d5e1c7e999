"""What goes wrong in the user's own file: one sentence with the error's type, text, file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from autopar.errors import AutoparError
from autopar.models import ModelSource, resolve
from autopar.user_code import with_rows

FILE = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, ids):
        return self.table(ids).sum()

IDS = torch.arange(15).reshape(3, 5)
def raises(): raise ValueError("no such size\\nand more")
def leaves(): raise SystemExit(5)
def needs(size, depth=2): return Net()
def reads_values():
    return nn.Linear(int(torch.ones(3).sum().item()), 2)
def fails(batch, seq): return {}["ids"]
def example_raises(): return Net(), fails
def example_none(): return Net(), lambda batch, seq: None
def example_takes_none(): return Net(), lambda: {"ids": IDS}
def example_list(): return Net(), [IDS]
def fixed(): return Net(), {"ids": torch.arange(15).reshape(3, 5), "scale": 2, "pair": (torch.arange(3), None)}
def drawn(): return Net(), lambda batch, seq: {"ids": torch.full((batch, seq), 7)}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModelSource]]:
    """Resolves a factory of FILE, or of another module written beside it."""
    (tmp_path / "own_net_for_test.py").write_text(FILE)
    (tmp_path / "broken_for_test.py").write_text("x = 1\ndef make(:\n")
    (tmp_path / "importing_for_test.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "raising_for_test.py").write_text("x = 1\nassert x == 2, 'not two'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: resolve(f"py:{name}" if ":" in name else f"py:own_net_for_test:{name}")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", r"the factory raised ValueError: no such size \(.*own_net_for_test.py:13\)"),
        ("leaves", r"the factory raised SystemExit: 5 \(.*:14\)"),
        ("needs", "the factory needs arguments: size"),
        ("reads_values", r"does not run on the meta device.*own_net_for_test.py:17"),
        ("example_raises", r"example\(2, 16\) raised KeyError: 'ids' \(.*:18\)"),
        ("example_none", r"example\(2, 16\) returned NoneType, not a dict of inputs"),
        ("example_takes_none", r"does not take \(batch, seq\)"),
        ("example_list", "neither a dict of inputs nor a function"),
        ("Net", "no example inputs"),
        ("broken_for_test:make", r"importing broken_for_test raised SyntaxError: .*broken_for_test.py:2\)"),
        ("importing_for_test:make", r"raised ModuleNotFoundError: .*no_such_package_at_all.*importing_for_test.py:1\)"),
        ("raising_for_test:make", r"raised AssertionError: not two \(.*raising_for_test.py:2\)"),
        (".:x", "not of the form"),
        ("a..b:x", "not of the form"),
    ],
)
def test_the_users_error_is_one_sentence(own: Callable[[str], ModelSource], name: str, says: str) -> None:
    def used() -> None:
        source = own(name)
        source.build()
        source.example()

    with pytest.raises(AutoparError, match=says) as caught:
        used()
    assert "\n" not in str(caught.value)


def test_materialize_keeps_every_value_and_repeats_rows(own: Callable[[str], ModelSource]) -> None:
    module, batch = own("fixed").materialize(4, 16)
    assert not next(module.parameters()).is_meta
    assert torch.equal(batch["ids"], torch.arange(15).reshape(3, 5)[torch.tensor([0, 1, 2, 0])])
    assert batch["scale"] == 2
    assert batch["pair"][0].tolist() == [0, 1, 2, 0]
    assert own("fixed").materialize(2, 16)[1]["ids"].shape == (4, 5)
    assert torch.equal(own("drawn").materialize(4, 6)[1]["ids"], torch.full((4, 6), 7))


def test_planning_reads_shapes_only(own: Callable[[str], ModelSource]) -> None:
    example = own("fixed").example(4)
    assert example["ids"].shape == (4, 5)
    assert not example["ids"].is_meta
    assert example["pair"][0].shape == (4,)


def test_an_input_without_rows_is_not_repeated() -> None:
    given = {"ids": torch.zeros(2, 6), "packed": {"offsets": torch.arange(5)}, "scale": torch.tensor(1.0)}
    made = with_rows(given, 4, None, "py:own:fixed")
    assert made["ids"].shape == (4, 6)
    assert made["packed"]["offsets"].tolist() == [0, 1, 2, 3, 4]
    assert made["scale"].shape == ()
