"""Commands as people give them: in processes of their own, or in this one where starting a process
is not the point."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from tests.support.rivers import Losses, River
from watersmeet.cli import main

_BEFORE_EACH = "\f"
_PROGRAM = """
import sys
from watersmeet.cli import main
for words in {commands!r}:
    print(end={before_each!r}, flush=True)
    sys.argv[1:] = words
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
    done = _without_java(river, [arguments])
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout.removeprefix(_BEFORE_EACH) or done.stderr


def _without_java(
    river: River, commands: Sequence[Sequence[str]]
) -> subprocess.CompletedProcess[str]:
    """The commands one after the other in one process, which ends with the first that fails."""
    program = _PROGRAM.format(commands=commands, before_each=_BEFORE_EACH)
    if not any("check" in words for words in commands):
        program += _WITHOUT_SPARK
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {
        "PATH": str(river.folder)
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=river.folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )


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
    "report --out page.html",
    "sql SELECT\tcount(*)\tFROM\tcorrected",
    "rebuild --into again",
    "verify --against again",
)
"""What is asked of a lake that holds something."""


def every_command_does_its_work(river: River) -> None:
    """On a river that is still empty, without Java: two runs merge and publish all, each command
    answers, and nothing changes. (A process for each would take twice the time.)"""
    river.flow()
    river.flow()
    in_turn(river, "validate", "run --once")
    river.flow()
    without_java(river, "run", "--once")
    assert river.losses() == Losses()
    assert without_java(river, "check", "--html", "quality.html")
    for command, answer in in_turn(river, *COMMANDS).items():
        assert answer, f"{command} answers something"
    assert river.losses() == Losses()


def in_turn(river: River, *commands: str) -> dict[str, str]:
    """What each command answers, all of them in one process without Java."""
    done = _without_java(river, [command.split(" ") for command in commands])
    assert done.returncode == 0, done.stdout + done.stderr
    _, *answers = done.stdout.split(_BEFORE_EACH)
    return dict(zip(commands, answers, strict=True))
