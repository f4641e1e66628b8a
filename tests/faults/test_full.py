"""A disk that is full, a quota that is used up, a process without a file handle left: a sentence
says so, and once there is room a start goes on by itself, and exactly.
(`python -m tests.faults.full` does it for longer.)"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.faults.full import below
from tests.support.effort import first_then_nightly
from tests.support.forgetful import HAS_COMPILER, WHY
from watersmeet.errors import ConfigurationError, TableError, no_room, root_cause

pytestmark = [pytest.mark.promise("N81"), pytest.mark.fault("disk", oracle=True)]

RUST = (
    "Generic LocalFileSystem error\n          \x1b[31m↳\x1b[0m Unable to open file /lake/1.json\n"
    "           \x1b[31m↳\x1b[0m No space left on device (os error 28)\n"
)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_COMPILER, reason=WHY)
@pytest.mark.parametrize(
    ("kind", "seed"),
    first_then_nightly(
        [(kind, seed) for seed in range(1000, 1010) for kind in ("runs", "changes")], 2
    ),
)
def test_whatever_is_refused_room_says_so_and_a_start_goes_on_exactly(
    kafka: str, tmp_path: Path, kind: str, seed: int
) -> None:
    assert below(kafka, tmp_path, "--kind", kind, "--first", str(seed), "--seeds", "1") == 0


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (
            OSError(RUST),
            "the disk has no room left (OSError: Generic LocalFileSystem error: Unable",
        ),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "the disk has no room left (OSError:"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "this process may open no more files ("),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "the file system is read-only (OSError:"),
    ],
)
def test_what_a_library_says_of_a_lack_of_room_is_a_sentence(error: OSError, begins: str) -> None:
    own = TableError("silver: something")
    own.__cause__ = error
    assert str(no_room(error)).startswith(begins)
    assert str(no_room(own)).startswith(f"{begins.partition('(')[0]}(silver: something);")


def test_causes_that_a_library_says_line_by_line_are_one_sentence() -> None:
    said = "OSError: Generic LocalFileSystem error: Unable to open file /lake/1.json: No space left"
    assert root_cause(OSError(RUST)).startswith(said)
    assert no_room(OSError("something else")) is None
    assert no_room(ConfigurationError("takes no commits (Read-only file system)")) is None
