"""The commands that try faults for long leave nothing behind, however they end."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("soak", ["--kills", "6", "--lake", "embedded"]),
        pytest.param("lives", ["--engine", "embedded"], marks=pytest.mark.nightly),
    ],
)
def test_one_that_is_asked_to_end_leaves_no_process(command: str, arguments: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.faults.{command}", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any(" of " in line or ", " in line for line in process.stderr)  # it is in the midst
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    assert process.wait(120) == 1
    assert len(started) > 1
    _, left = psutil.wait_procs(started, timeout=30)
    assert not left
