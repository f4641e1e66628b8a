"""A lake's folder is tried before it is used: what takes no commits is refused with one sentence,
and nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.configurations import settings_for
from watersmeet.errors import ConfigurationError
from watersmeet.lake.location import Lake
from watersmeet.lake.store import check_writable


def check(folder: Path, where: Path) -> None:
    check_writable(Lake(settings_for(folder, lake=str(where))))


def test_a_folder_that_is_there_or_can_be_made_is_let_pass_and_left_as_it_was(
    tmp_path: Path,
) -> None:
    (tmp_path / "there").mkdir()
    for where in (tmp_path / "there", tmp_path / "not" / "yet"):
        check(tmp_path, where)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigurationError,
        match=r"lake: the folder .*/file/lake takes no commits \(Not a directory\)",
    ):
        check(tmp_path, tmp_path / "file" / "lake")


def test_a_file_system_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        """As a mounted object store answers; there is none here to mount."""
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(
        ConfigurationError, match=r"takes no commits \(Function not implemented\); .* hard links"
    ):
        check(tmp_path, tmp_path / "lake")
    assert list(tmp_path.iterdir()) == []
