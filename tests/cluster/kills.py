"""A real cluster under attack, and one that does not fit: `make cluster-test`. (pytest collects it
only by its name.)"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.rivers import FOLDER, Losses, River, RunProcess, until
from tests.support.standalone import HOST, StandaloneCluster
from tests.support.submitting import BARE_PYTHON, Submission
from watersmeet.dev.processes import free_port


@pytest.fixture(scope="module")
def submission(tmp_path_factory: pytest.TempPathFactory) -> Submission:
    return Submission.build(tmp_path_factory.mktemp("submission"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    with StandaloneCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.mark.timeout(1800)
def test_lost_executors_and_a_lost_driver_lose_and_repeat_nothing(
    submission: Submission, cluster: StandaloneCluster, kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "cluster-kills", lake=FOLDER)
    port = free_port()
    ui = ("--conf", "spark.ui.enabled=true", "--conf", f"spark.ui.port={port}")
    river.program, river.environment = (
        submission.command(cluster.master, *ui),
        submission.environment,
    )

    river.flow()
    run = river.run("--once", point="bronze.append")
    run.await_held()
    cluster.lose_executors()
    run.let_go()
    assert run.wait() == 0, run.said()

    river.flow(records=200)
    run = river.run("--once", point="silver.merge")
    run.await_held()
    kill_an_executor_at_work(cluster, run, port)
    assert run.wait() == 0, run.said()
    assert "ExecutorLostFailure" in run.log.read_text(errors="replace"), "no task was lost"

    river.flow()
    river.kill_at("silver.done", "--once")
    river.flow()
    river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "what",
    ["another minor version", "no packages", "no such program", "another folder", "no Delta Lake"],
)
def test_a_cluster_that_does_not_fit_is_refused_in_one_sentence(
    what: str, submission: Submission, cluster: StandaloneCluster, kafka: str, tmp_path: Path
) -> None:
    (tmp_path / "lake").mkdir()
    river = River.make(kafka, tmp_path / "lake", f"unfit-{what.replace(' ', '-')}", lake=FOLDER)
    river.environment = submission.environment
    command, said = submission.command(cluster.master), ""
    if what == "another minor version":
        # Python workers are the driver's `PYSPARK_PYTHON`; the driver itself may be another one.
        command = submission.command(
            cluster.master,
            "--conf",
            f"spark.pyspark.driver.python={BARE_PYTHON}",
            python=other_python(),
        )
        said = "has different version"
    elif what == "no packages":
        command = without(command, "spark.executorEnv.")
        said = "No module named"
    elif what == "no such program":
        command = submission.command(
            cluster.master,
            "--conf",
            f"spark.pyspark.driver.python={BARE_PYTHON}",
            python="/no/such/python",
        )
        said = "/no/such/python"
    elif what == "no Delta Lake":
        command = without(without(command, "spark.sql.extensions"), "spark.sql.catalog.")
        said = "this Spark session has no Delta Lake"
    if what == "another folder":
        with StandaloneCluster(tmp_path, workers=1, before=elsewhere(river.folder)) as apart:
            river.program = submission.command(apart.master)
            refused(river, "Spark's executors do not see it")
    else:
        river.program = command
        refused(river, said)


def refused(river: River, said: str) -> None:
    run = river.run("--once")
    assert run.wait() == 2, run.said()
    sentences = [
        line
        for line in run.log.read_text(errors="replace").splitlines()
        if line.startswith("watersmeet: ")
    ]
    assert len(sentences) == 1
    assert said in sentences[0]
    assert "Traceback" not in sentences[0]


def without(command: list[str], setting: str) -> list[str]:
    """The command without a setting whose name begins so."""
    at = next(i for i, word in enumerate(command) if word.startswith(setting))
    return [*command[: at - 1], *command[at + 1 :]]


def elsewhere(folder: Path) -> list[str]:
    """What a worker is started by so that this folder is an empty one of its own."""
    return [
        "unshare",
        "--map-root-user",
        "--mount",
        "bash",
        "-c",
        f'mount -t tmpfs none "{folder}" && exec "$@"',
        "bash",
    ]


def other_python() -> str:
    """An interpreter of another minor version, from the PATH or from beside this one's
    installation."""
    for name in (f"python3.{minor}" for minor in range(10, 20) if minor != sys.version_info.minor):
        for found in (name, *map(str, Path(sys.base_prefix).parent.glob(f"*/bin/{name}"))):
            with suppress(OSError, subprocess.CalledProcessError):
                subprocess.run([found, "-c", ""], capture_output=True, check=True)
                return found
    pytest.skip("this machine has one version of Python only")


def kill_an_executor_at_work(cluster: StandaloneCluster, run: RunProcess, ui_port: int) -> None:
    """Ends an executor that has a task of the batch which the run is let go for, as the driver's
    own pages tell. All stand still until then: a task takes less time than to ask for it."""
    executors = cluster.executors()
    for executor in executors:
        executor.suspend()

    def has_task() -> bool:
        assert run.process.poll() is None, run.said()
        return bool(busy(ui_port))

    run.let_go()
    try:
        until(has_task, "an executor at work")
        at_work = busy(ui_port)
        next(executor for executor in executors if number(executor) in at_work).kill()
    finally:
        for executor in executors:
            with suppress(psutil.NoSuchProcess):
                executor.resume()


def number(executor: psutil.Process) -> str:
    """What the driver calls it."""
    with suppress(psutil.NoSuchProcess):
        command = executor.cmdline()
        return command[command.index("--executor-id") + 1]
    return ""


def busy(ui_port: int) -> set[str]:
    """The executors that run a task."""
    with suppress(OSError):
        here = f"http://{HOST}:{ui_port}/api/v1/applications"
        here += f"/{answer(here)[0]['id']}/stages"
        stages = answer(f"{here}?status=active")
        asked = (
            f"{here}/{stage['stageId']}/{stage['attemptId']}/taskList?status=running"
            for stage in stages
        )
        return {task["executorId"] for url in asked for task in answer(url)}
    return set()


def answer(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as found:
        return json.load(found)
