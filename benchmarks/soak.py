"""`make soak`: half an hour at a steady rate, with a stop and a start in the middle. Does anything
grow that should not?

    python -m benchmarks.soak --engine embedded --minutes 30

All layers run in one process, with maintenance. Every few seconds the run's memory, threads and
open files, and the files of each table are counted; how long merge records took to the sink is
compared afterwards. Each of the two runs is cut into quarters. What is compared are medians of the
second and of the last quarter of a run (the first warms up), and of the last quarters of both runs:
they are equally old, and the lake is not. A `run --once` goes before both, since a start beside a
sink that holds messages asks it for them, and keeps some connections. At the end `verify` must find
every promise kept. Exit status 1 where a figure has grown by more than its mark, or a promise is
broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.latency import TIMEOUT_MS, Receiver, Sender, latencies, prepare
from benchmarks.programs import ProgramError, embedded_broker, notify, program
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake
from watersmeet.settings import Settings

PARTITIONS = 4
EVERY_S = 5.0
QUARTERS = 4
MARKS = {
    "memory, MiB": 1.15,
    "threads": 1.1,
    "open files": 1.15,
    "files of a table": 1.5,
    "seconds to the sink": 1.5,
}
"""How many times as large a figure may become. A table's files vary between two compactions."""
SETTLE_S = 60.0
"""So long the last records have to get through before `verify` looks."""


@dataclass
class Watched:
    """What was counted of one run: by figure, pairs of when (s) and how much."""

    began: float
    ended: float = 0.0
    counted: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: {name: [] for name in MARKS}
    )

    def quarter(self, name: str, number: int) -> float:
        """The median of a figure in a quarter of the run, the first of which is 0."""
        length = (self.ended - self.began) / QUARTERS
        since = self.began + number * length
        return median([value for at, value in self.counted[name] if since <= at < since + length])


def main() -> None:
    """Parses, runs, prints, and keeps the figures as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--engine", choices=["spark", "embedded"], default="spark")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=int, default=1000, help="records per second (1000)")
    parser.add_argument(
        "--out", type=Path, default=Path("soak.json"), help="where the JSON goes (soak.json)"
    )
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(
            prefix="watersmeet-soak-", ignore_cleanup_errors=True
        ) as name:
            runs = soak(Path(name), options.engine, options.minutes * 60, options.rate)
    except ProgramError as error:
        sys.exit(f"soak: {error}")
    growths = {name: growth(runs, name) for name in MARKS}
    facts = {
        **machine.describe(),
        "engine": options.engine,
        "minutes": options.minutes,
        "rate": options.rate,
    }
    figures = {
        name: [[run.quarter(name, number) for number in range(QUARTERS)] for run in runs]
        for name in MARKS
    }
    options.out.write_text(
        json.dumps({**facts, "figures": figures, "growth": growths}, indent=2) + "\n"
    )
    show(facts, figures, growths)
    sys.exit(any(value > MARKS[name] for name, value in growths.items()))


def soak(folder: Path, engine: str, seconds: float, rate: int) -> list[Watched]:
    """Two runs over one lake while records keep coming. Raises ProgramError where one fails, or a
    promise is broken."""
    with embedded_broker(folder / "broker") as bootstrap_servers:
        settings = prepare(folder, bootstrap_servers, engine, PARTITIONS)
        sender, is_over = Sender(settings, PARTITIONS, rate), threading.Event()
        sending = threading.Thread(
            target=sender.send_until, args=[is_over.is_set], name="sender", daemon=True
        )
        with Receiver(settings, PARTITIONS) as receiver:
            sending.start()
            time.sleep(2 * TIMEOUT_MS / 1000)  # so that some merge records have timed out
            _command(folder, "run", "--once")
            runs = [_run(folder, settings, receiver, seconds / 2) for _ in range(2)]
            is_over.set()
            sending.join()
            _verify(folder)
        _add_latencies(runs, latencies(sender.acknowledged, receiver.arrivals, TIMEOUT_MS))
        return runs


def _run(folder: Path, settings: Settings, receiver: Receiver, seconds: float) -> Watched:
    """One run, watched for so long after it is ready."""
    lake = Lake(settings)
    reader = DeltaRsReader(lake)
    with program(folder, "-m", "watersmeet", "run") as running:
        running.await_words("lake: ready")
        run = Watched(time.time())
        notify(f"{settings.engine}: a run of {seconds:.0f} s")
        while time.time() < run.began + seconds:
            if running.process.poll() is not None:
                raise ProgramError(f"the run ended by itself: {running.said()[-2000:]}")
            for name, value in (
                *_of_processes(running.process.pid).items(),
                *_of_tables(reader, lake).items(),
            ):
                run.counted[name].append((time.time(), value))
            time.sleep(EVERY_S)
        run.ended = time.time()
        if not receiver.has_passed(int((run.ended - SETTLE_S) * 1000)) and seconds > 4 * SETTLE_S:
            raise ProgramError(f"the run fell behind: {running.said()[-2000:]}")
        running.stop()
    return run


def _of_processes(pid: int) -> dict[str, float]:
    """Memory (PSS), threads and open files of a process and all that it has started."""
    sums = dict.fromkeys(("memory, MiB", "threads", "open files"), 0.0)
    with suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                sums["memory, MiB"] += process.memory_full_info().pss / 2**20
                sums["threads"] += process.num_threads()
                sums["open files"] += process.num_fds()
    return sums


def _of_tables(reader: DeltaRsReader, lake: Lake) -> dict[str, float]:
    """The files of the table that has most."""
    return {"files of a table": max(map(reader.file_count, lake.layout))}


def _add_latencies(runs: Sequence[Watched], found: Sequence[tuple[float, float]]) -> None:
    for run in runs:
        run.counted["seconds to the sink"] = [
            (at, waited) for at, waited in found if run.began <= at < run.ended
        ]


def _verify(folder: Path) -> None:
    """Everything that was sent passes through; then the promises are checked."""
    _command(folder, "run", "--once")
    notify(_command(folder, "verify"))


def _command(folder: Path, *arguments: str) -> str:
    """The last line that a command says."""
    with program(folder, "-m", "watersmeet", *arguments) as running:
        running.wait()
    return running.said().strip().rpartition("\n")[2]


def growth(runs: Sequence[Watched], name: str) -> float:
    """How many times as large a figure was in the end: of the last quarter of each run to its
    second, and of both last ones."""
    first, second = runs
    ends = [run.quarter(name, QUARTERS - 1) for run in runs]
    return max(
        ends[0] / first.quarter(name, 1), ends[1] / second.quarter(name, 1), ends[1] / ends[0]
    )


def show(
    facts: Mapping[str, object],
    figures: Mapping[str, Sequence[Sequence[float]]],
    growths: Mapping[str, float],
) -> None:
    """A line for each figure: its medians by quarter of both runs, and how much it has grown."""
    table = Table(
        "",
        "first run",
        "second run",
        "growth",
        "mark",
        title=", ".join(f"{name} {value}" for name, value in facts.items()),
    )
    for name, of_runs in figures.items():
        quarters = [" ".join(f"{value:.4g}" for value in values) for values in of_runs]
        table.add_row(name, *quarters, f"{growths[name]:.2f}", f"{MARKS[name]:g}")
    Console().print(table)


if __name__ == "__main__":
    main()
