"""When a process counts as ended, and who collects it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from watersmeet.dev.processes import alive


@pytest.fixture
def child() -> Iterator[int]:
    """A process of this one that nobody but the law under test collects."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield started.pid
        started.kill()


def end_of(pid: int) -> None:
    """Ends a process, and returns when it has: a zombie from now on, for as long as its parent has
    not collected it."""
    process = psutil.Process(pid)
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        pass


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("moment", ["is_running", "status", "wait"])
def test_a_child_that_ends_at_any_moment_of_a_look_is_collected_or_still_counts_as_alive(
    child: int, moment: str, is_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Callable[..., Any] = getattr(psutil.Process, moment)

    def ends(process: psutil.Process, *arguments: Any) -> Any:
        monkeypatch.undo()
        if is_before:
            end_of(child)
        try:
            return asked(process, *arguments)
        finally:
            if not is_before:
                end_of(child)

    process = psutil.Process(child)
    monkeypatch.setattr(psutil.Process, moment, ends)
    while alive(process):
        assert psutil.pid_exists(child)
    assert not psutil.pid_exists(child), "not even a zombie is left"


def test_a_zombie_of_another_process_is_not_alive_though_only_its_parent_can_collect_it() -> None:
    code = (
        "import subprocess, sys, psutil; child = subprocess.Popen([sys.executable, '-c', '']);\n"
        "while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE: pass\n"
        "print(child.pid, flush=True); sys.stdin.read(); child.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        zombie = psutil.Process(int(parent.stdout.readline()))
        assert zombie.status() == psutil.STATUS_ZOMBIE
        assert not alive(zombie)
        assert zombie.status() == psutil.STATUS_ZOMBIE, "it is its parent's"
