"""A standalone Spark cluster on this machine: a master and workers from the pinned pyspark, each a
process of its own."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyspark

from tests.support.rivers import until

HOME = Path(pyspark.__file__).parent
HOST = "127.0.0.1"
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of a JVM that runs much code a few times."""


def environment() -> dict[str, str]:
    """What Spark's own scripts need to work on this machine alone; nothing of the test run's own
    Python."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYSPARK", "SPARK"))
    }
    return inherited | {
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_LOCAL_HOSTNAME": HOST,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": QUICK,
        "SPARK_CONF_DIR": str(Path(__file__).with_name("spark")),
    }


@dataclass
class StandaloneCluster:
    """A master and `workers`, each with one core and `memory`, as a context: afterwards none of
    their processes is left.

    `before`: a command that a worker is started by, such as `unshare`.
    """

    folder: Path
    workers: int = 2
    memory: str = "1g"
    before: Sequence[str] = ()
    master: str = ""
    _processes: list[psutil.Popen] = field(default_factory=list)

    def __enter__(self) -> StandaloneCluster:
        try:
            log = self._start("Master", "master", "--port", "0")
            self.master = self._said(log, r"Starting Spark master at (spark://\S+)")
            for number in range(self.workers):
                at = [
                    "--cores",
                    "1",
                    "--memory",
                    self.memory,
                    "--work-dir",
                    str(self.folder / f"worker-{number}"),
                ]
                log = self._start(
                    "Worker",
                    f"worker-{number}",
                    *at,
                    "--port",
                    "0",
                    self.master,
                    before=self.before,
                )
                self._said(log, r"(Successfully registered with master)")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, kind: str, name: str, *arguments: str, before: Sequence[str] = ()) -> Path:
        log = self.folder / f"{name}.log"
        command = [
            str(HOME / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{kind.lower()}.{kind}",
        ]
        command += ["--host", HOST, "--webui-port", "0", *arguments]
        with log.open("wb") as out:
            process = psutil.Popen(
                [*before, *command],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(),
                cwd=self.folder,
            )
        self._processes.append(process)
        return log

    def _said(self, log: Path, pattern: str) -> str:
        def found() -> re.Match[str] | None:
            return re.search(pattern, log.read_text(errors="replace"))

        until(lambda: found() is not None, f"{pattern} in {log}", 60)
        match = found()
        assert match is not None
        return match[1]

    def executors(self) -> list[psutil.Process]:
        """The JVMs that run tasks, one for each worker while a driver has them."""
        return executors_of(_with_children(self._processes))

    def lose_executors(self) -> int:
        """Kills them with all that they hold; the workers start new ones. How many there were."""
        lost = self.executors()
        for executor in lost:
            executor.kill()
        psutil.wait_procs(lost, timeout=30)
        return len(lost)

    def __exit__(self, *_: object) -> None:
        end(self._processes)


def end(processes: Sequence[psutil.Process]) -> None:
    """Kills processes and their children, and waits for the end of them."""
    family = _with_children(processes)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=30)


def executors_of(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of some processes that run Spark's tasks."""
    return [
        process
        for process in processes
        if "org.apache.spark.executor" in " ".join(_command(process))
    ]


def _with_children(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += [process, *process.children(recursive=True)]
    return found


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []
