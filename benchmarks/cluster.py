"""A backlog on a standalone Spark cluster of this machine: records a second with two executors, to
those with one, each with one core. They have the machine's cores in common with the driver and the
broker.

python -m benchmarks.cluster
python -m benchmarks.cluster --records 550000 --turns 1
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.backlog import River, Run, river
from benchmarks.inputs import Shape
from benchmarks.programs import ROOT, notify
from tests.support.standalone import StandaloneCluster


def main() -> None:
    """Measures one and two executors in turns, and prints the better run of each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--records", type=int, default=2_200_000, help="(%(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="runs of each (%(default)s)")
    options = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with (
        tempfile.TemporaryDirectory(prefix="watersmeet-bench-") as name,
        river(Path(name, "backlog"), options.records, 4, Shape()) as backlog,
    ):
        for turn in range(options.turns):
            for workers, taken in seconds.items():
                run = _run(backlog, Path(name, f"cluster-{workers}-{turn}"), workers)
                taken.append(run.seconds)
                steps = ", ".join(f"{layer} {at:.1f}" for layer, at in run.steps.items())
                notify(f"{workers} executor(s): {run.seconds:.1f} s (last news: {steps})")
    one, two = (min(taken) for taken in seconds.values())
    print(
        f"{options.records / one:,.0f} records/s with one executor, {options.records / two:,.0f} "
        f"with two: {one / two:.2f} times as many"
    )


def _run(backlog: River, folder: Path, workers: int) -> Run:
    folder.mkdir()
    with StandaloneCluster(folder, workers=workers) as cluster:
        settings = {
            "spark.master": cluster.master,
            "spark.executorEnv.PYTHONPATH": str(ROOT / "pipelines"),
        }
        return backlog.run("spark", folder.name, settings)


if __name__ == "__main__":
    main()
