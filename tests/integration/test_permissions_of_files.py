"""What a run and its answers write is for its user and, as far as the umask lets it, its group: it
holds what senders wrote."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import in_process
from tests.support.rivers import River

pytestmark = pytest.mark.promise("C70")


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.long
@pytest.mark.usefixtures("umask")
def test_nobody_else_may_read_what_a_command_makes(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "umask", partitions=1)
    before = set(tmp_path.rglob("*"))
    river.flow()
    for command in (["run", "--once"], ["report", "--out", "page.html"]):
        done = in_process(*command, "-c", river.file, cwd=river.folder)
        assert done.returncode == 0, done.stderr
    made = {path: stat.S_IMODE(path.stat().st_mode) for path in set(tmp_path.rglob("*")) - before}
    assert {"lake", "leases", "silver", "page.html"} <= {path.name for path in made}
    assert {path: oct(mode) for path, mode in made.items() if mode & 0o007} == {}
    assert any(mode & 0o040 for mode in made.values()), "a group may, where the umask says so"
