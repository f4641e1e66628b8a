"""A pytest plugin: processor time of each test and fixture, with that of the processes that they
start.

`pytest -p tests.support.processor_time --processor-times FILE` appends one JSON line a measurement
to FILE, from all processes of a run: {"kind": "test" | "fixture", "file", "name", "wall_s",
"processor_s", "worker"}. Fixtures count for themselves and not for the test that happened to need
them first. `python -m tests.support.processor_time FILE` prints a table by file, and one of the
fixtures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]

CHEAP_S = 0.02
"""What ends sooner starts no process: looking at all processes of the machine would cost more than
the test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processor-times",
        metavar="FILE",
        help="append the processor time of each test and fixture to FILE",
    )


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("processor_times"):
        config.pluginmanager.register(ProcessorTimes(Path(file).absolute()))


class ProcessorTimes:
    """Measures what this process and its descendants use, ended ones included where somebody waited
    for them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._process = psutil.Process()
        self._in_fixtures = [0.0, 0.0]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._in_fixtures = [0.0, 0.0]
        begin = self._now()
        result = yield
        wall_s, processor_s = self._since(begin)
        path = item.path.relative_to(ROOT)
        self._append(
            "test",
            str(path),
            item.name,
            wall_s - self._in_fixtures[0],
            processor_s - self._in_fixtures[1],
        )
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            result = yield
            return result
        before, begin = list(self._in_fixtures), self._now()
        result = yield
        wall_s, processor_s = self._since(begin)
        nested = [now - then for now, then in zip(self._in_fixtures, before, strict=True)]
        self._append(
            "fixture",
            fixturedef.baseid,
            fixturedef.argname,
            wall_s - nested[0],
            processor_s - nested[1],
        )
        self._in_fixtures = [before[0] + wall_s, before[1] + processor_s]
        return result

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), self._processor_s()

    def _since(self, begin: tuple[float, float]) -> tuple[float, float]:
        wall_s = time.monotonic() - begin[0]
        if wall_s < CHEAP_S:
            return wall_s, wall_s
        return wall_s, self._processor_s() - begin[1]

    def _processor_s(self) -> float:
        total = 0.0
        for process in [self._process, *self._process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def _append(self, kind: str, file: str, name: str, wall_s: float, processor_s: float) -> None:
        row = {
            "kind": kind,
            "file": file,
            "name": name,
            "wall_s": round(wall_s, 3),
            "processor_s": round(processor_s, 3),
        }
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(
                json.dumps({**row, "worker": os.environ.get("PYTEST_XDIST_WORKER", "")}) + "\n"
            )


def main(file: str) -> None:
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    for kind in ("test", "fixture"):
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            if row["kind"] == kind:
                groups[row["file"] if kind == "test" else f"{row['file']}::{row['name']}"].append(
                    row
                )
        total = {name: sum(row["processor_s"] for row in group) for name, group in groups.items()}
        heading = (
            f"{'processor s':>11} {'wall s':>8} {'count':>6}  {kind}: {sum(total.values()):.0f} s "
            "of processor"
        )
        sys.stdout.write(f"{heading}\n")
        for name in sorted(groups, key=lambda name: -total[name]):
            wall_s = sum(row["wall_s"] for row in groups[name])
            sys.stdout.write(f"{total[name]:11.1f} {wall_s:8.1f} {len(groups[name]):6}  {name}\n")


if __name__ == "__main__":
    main(sys.argv[1])
