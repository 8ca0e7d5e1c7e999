"""Output files: whole or as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar.errors import SpecError
from autopar.whole_file import write_whole


def test_a_file_is_replaced_with_the_rights_of_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    before = os.umask(0o027)
    try:
        write_whole("old", path, "the file")
        write_whole("new", path, "the file")
    finally:
        os.umask(before)
    assert path.read_text(encoding="utf-8") == "new"
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("ends", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_ends_the_writing_leaves_the_old_file_alone(
    ends: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("old", encoding="utf-8")

    def end(*_: object) -> None:
        raise ends

    monkeypatch.setattr(os, "replace", end)
    with pytest.raises((KeyboardInterrupt, SpecError)) as raised:
        write_whole("new", path, "the cluster file")
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.toml"]
    assert path.read_text(encoding="utf-8") == "old"
    if raised.type is SpecError:
        assert "cannot write the cluster file: No space left on device" in str(raised.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot write the plan: No such file or directory"):
        write_whole("text", tmp_path / "none" / "plan.json", "the plan")


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    link, target, pipe = tmp_path / "latest.json", tmp_path / "plan.json", tmp_path / "pipe"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    write_whole("new", link, "the plan")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "new"

    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole("text", pipe, "the plan")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.json", "pipe", "plan.json"]
