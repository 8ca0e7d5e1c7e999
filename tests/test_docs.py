"""The examples in the documents are read by the code they describe, and its lists of names are complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from autopar.cluster_file import DEVICE_KEYS, FLOPS_KEYS, LINK_KEYS
from autopar.hardware import DEVICES, NODES
from autopar.model_presets import PRESETS
from autopar.plan import Plan
from autopar.specs import ATTENTION, ELEMENTWISE, OVERLAPS, ClusterSpec

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def fenced(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def test_the_cluster_file_of_the_document_loads(tmp_path: Path) -> None:
    blocks = fenced(DOCS / "cluster_file.md", "toml")
    assert blocks
    for block in blocks:
        assert tomllib.loads(block)
        path = tmp_path / "cluster.toml"
        path.write_text(block)
        assert ClusterSpec.load(path).num_devices == 16


def test_the_plan_of_the_document_loads() -> None:
    (block,) = fenced(DOCS / "plan_file.md", "json")
    plan = Plan.loads(block)
    assert plan.degrees.world_size == 4
    assert plan.checkpoint_mode("model.layers.1") == "full"


@pytest.mark.parametrize(
    ("document", "names"),
    [
        (
            "cluster_file.md",
            [*DEVICE_KEYS, *FLOPS_KEYS, *LINK_KEYS, *DEVICES, *NODES, *ATTENTION, *ELEMENTWISE, *OVERLAPS],
        ),
        ("cli.md", list(PRESETS)),
        ("plan_file.md", list(Plan.__dataclass_fields__)),
    ],
)
def test_every_name_is_documented(document: str, names: list[str]) -> None:
    text = (DOCS / document).read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}" not in text] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        assert target.startswith("http") or (path.parent / target).exists(), target
