"""What a run and its answers write is for its user and, as far as the umask lets it, its group: it
holds what senders wrote."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
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


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.usefixtures("umask")
def test_nobody_else_may_read_what_a_session_of_spark_makes(tmp_path: Path) -> None:
    """Hadoop gives files permissions of its own, and no other umask than one of its settings."""
    program = (
        "import os; os.umask(0o027); from watersmeet.engine.session import spark_session; "
        "rows = spark_session({}).range(9); "
        f"rows.write.format('delta').save('file:{tmp_path}/table')"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    made = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("table/**/*")}
    assert any(path.suffix == ".parquet" for path in made)
    assert {path: oct(mode) for path, mode in made.items() if mode & 0o027} == {}
    assert all(mode & 0o040 for mode in made.values())
