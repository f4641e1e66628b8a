"""Programs as processes of their own, and the broker that they talk to: started, watched and ended
here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import PeakMemory
from watersmeet.dev import broker

ROOT = Path(__file__).resolve().parent.parent
_LONGEST_RUN_S = 7200.0
SYNC_MS = 5
"""How long a sync of the slow disk takes, as the bounds of point 13 were set for."""


class ProgramError(RuntimeError):
    """A program failed, or did not do what it is measured for."""


@dataclass
class Program:
    """A program under way; `seconds` is known once it has ended."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float
    memory: PeakMemory
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """What it is called in a sentence: its folder's name."""
        return self.log.parent.name

    def wait(self, timeout_s: float = _LONGEST_RUN_S) -> None:
        """Returns when it has ended well. Raises ProgramError where it fails or takes too long."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProgramError(
                f"{self.name} did not end within {timeout_s:.0f} s: {self.said()[-2000:]}"
            ) from None
        self.seconds = time.time() - self.began
        if status != 0:
            raise ProgramError(f"{self.name} ended with status {status}: {self.said()[-2000:]}")

    def stop(self) -> None:
        """Asks it to end, and waits until it has ended well."""
        self.process.terminate()
        self.wait(300)

    def await_words(self, words: str, timeout_s: float = 180) -> None:
        """Returns once it has said the words. Raises ProgramError where it ends before, or says
        nothing of the kind."""
        until = time.monotonic() + timeout_s
        while words not in self.said():
            if self.process.poll() is not None or time.monotonic() > until:
                raise ProgramError(f"{self.name} never said `{words}`: {self.said()[-2000:]}")
            time.sleep(0.2)

    def said(self) -> str:
        """Its output so far."""
        return self.log.read_text(errors="replace")


@contextmanager
def program(folder: Path, *arguments: str) -> Iterator[Program]:
    """A Python program with these arguments, in this folder; afterwards neither it nor anything it
    started is left."""
    with started(folder, [sys.executable, *arguments]) as running:
        yield running


@contextmanager
def started(folder: Path, command: Sequence[str]) -> Iterator[Program]:
    """The same of any command."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"program-{time.monotonic_ns()}.log"
    # This checkout is what is measured, whatever is installed.
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'pipelines'}:{ROOT}"}
    began = time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=folder
        )
    memory = PeakMemory(process.pid)
    try:
        with memory:
            yield Program(process, log, began, memory)
    finally:
        memory.end_family()
        process.wait()


@contextmanager
def embedded_broker(folder: Path) -> Iterator[str]:
    """Where a broker of one's own is reached, until the end of the block."""
    # A group's first member would wait three seconds for more of them.
    settings = {"group.initial.rebalance.delay.ms": "0"}
    try:
        yield str(broker.start(folder, settings=settings).bootstrap_servers)
    finally:
        broker.stop(folder)


@contextmanager
def slow_disk(folder: Path) -> Iterator[None]:
    """Lets each sync of a file take five milliseconds longer, for what is started in the block.

    Raises ProgramError where there is no C compiler for the library that does so."""
    if shutil.which("cc") is None:
        raise ProgramError("a disk that syncs slowly needs a C compiler (`cc`)")
    library = folder / "slow_disk.so"
    source = Path(__file__).with_name("slow_disk.c")
    folder.mkdir(parents=True, exist_ok=True)
    options = "-shared", "-fPIC", f"-DSYNC_US={SYNC_MS * 1000}"
    subprocess.run(["cc", *options, "-o", library, source, "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = str(library)
    try:
        yield
    finally:
        del os.environ["LD_PRELOAD"]


def notify(text: str) -> None:
    """A word on how it gets on, beside the results."""
    print(text, file=sys.stderr, flush=True)


def bytes_in(folder: Path) -> int:
    """Of all files below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
