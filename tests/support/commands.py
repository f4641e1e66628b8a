"""Commands as people give them: in processes of their own, or in this one where starting a process
is not the point."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from pipelines.cli import main
from tests.support.rivers import Losses, River

_PROGRAM = """
import sys
from pipelines.cli import main
main()
"""
_WITHOUT_SPARK = """
spark = {"pyspark", "py4j", "delta"} & sys.modules.keys()
assert not spark, f"{spark} were imported"
"""


def without_java(river: River, *arguments: str, exit_code: int = 0) -> str:
    """What a command answers in a process that could find no Java, and that must not look for Spark
    either: its standard output, or its standard error where it fails as it should. (Great
    Expectations imports pyspark where it is installed, and leaves it.)
    """
    program = _PROGRAM if arguments[0] == "check" else _PROGRAM + _WITHOUT_SPARK
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {
        "PATH": str(river.folder)
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=river.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout if done.stdout else done.stderr


def in_process(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, as if it had been called in the folder `cwd`."""
    out, errors, status = io.StringIO(), io.StringIO(), 0
    words, before = ["watersmeet", *map(str, arguments)], Path.cwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    os.chdir(cwd)
    try:
        with redirect_stdout(out), redirect_stderr(errors), patch.object(sys, "argv", words):
            main()
    except SystemExit as done:
        status = int(done.code or 0)
    finally:
        os.chdir(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(words, status, out.getvalue(), errors.getvalue())


def here(river: River, *arguments: str, exit_code: int = 0) -> str:
    """The same in this process, with Spark on the session that is there."""
    done = in_process(*arguments, "-c", river.file, cwd=river.folder)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout or done.stderr


COMMANDS = (
    "status",
    "explain a",
    "maintain",
    "verify --full",
    "check --html quality.html",
    "report --out page.html",
    "rebuild --into again",
    "verify --against again",
)
"""What is asked of a lake that holds something."""


def every_command_does_its_work(river: River) -> None:
    """On a river that is still empty, without Java: two runs merge and publish all, each command
    answers, and nothing changes."""
    river.flow()
    river.flow()
    without_java(river, "validate")
    without_java(river, "run", "--once")
    river.flow()
    without_java(river, "run", "--once")
    assert river.losses() == Losses()
    for command in COMMANDS:
        assert without_java(river, *command.split(" ")), f"{command} answers something"
    assert river.losses() == Losses()
