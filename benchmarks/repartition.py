"""How fast `watersmeet repartition` writes a topic anew, by its merge key and with another number
of partitions.

Producing the input is not timed. `watersmeet repartition --once` is, as a process of its own, each
time into another topic of the same broker. Not a point of `make bench`: the stage runs beside the
layers, and has no marks.

python -m benchmarks.repartition
python -m benchmarks.repartition --records 100000 --rounds 1 --engine embedded
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks import machine
from benchmarks.inputs import Shape, fill_topics, write_configuration
from benchmarks.points import ENGINES
from benchmarks.programs import ProgramError, embedded_broker, notify, program
from watersmeet.kafka.cluster import Cluster
from watersmeet.settings import load_settings


def main() -> None:
    """Measures every engine in turns, and prints JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repartition")
    parser.add_argument(
        "--records", type=int, default=1_000_000, help="records of the topic (%(default)s)"
    )
    parser.add_argument(
        "--partitions",
        type=int,
        nargs=2,
        default=(4, 8),
        help="of the topic, and of the new one (4 8)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine (%(default)s)")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        action="append",
        help="what the configuration names; both without one",
    )
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(
        prefix="watersmeet-bench-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        with embedded_broker(folder / "broker") as servers:
            before, after = options.partitions
            settings = load_settings(write_configuration(folder / "input", servers))
            fill_topics(
                Cluster(settings.kafka),
                settings,
                options.records,
                max(1, options.records // 10),
                before,
                Shape(),
            )
            for number in range(options.rounds):
                for engine in options.engine or ENGINES:
                    runs.append(_run(folder / f"{engine}-{number}", servers, engine, after))
                    notify(json.dumps(runs[-1]))
    print(json.dumps({"machine": machine.describe(), "runs": runs}, indent=2))


def _run(folder: Path, servers: str, engine: str, partitions: int) -> dict[str, Any]:
    """One run. Raises ProgramError where it did not write every record."""
    file = write_configuration(folder, servers, engine=engine)
    config = yaml.safe_load(file.read_text())
    config["sources"]["tracking"] |= {
        "topic": folder.name,
        "repartition": {"from": "tracking", "partitions": partitions},
    }
    file.write_text(yaml.safe_dump(config))
    before = _processor_s()
    with program(folder, "-m", "watersmeet", "repartition", "--once", "--json") as running:
        running.wait()
    processor_s = _processor_s() - before
    [told] = json.loads(running.said()[running.said().index("{") :])["sources"]
    if told["records"] != sum(told["read"].values()):
        raise ProgramError(
            f"{folder.name}: {told['records']} records were written of {sum(told['read'].values())}"
        )
    rate = round(told["records"] / running.seconds)
    memory = round(running.memory.peak_bytes / 2**20)
    times = {"seconds": round(running.seconds, 1), "processor_seconds": round(processor_s, 1)}
    return {"engine": engine, **times, "records_per_second": rate, "peak_mib": memory}


def _processor_s() -> float:
    """What all programs that have ended took of the processors, with the workers that they waited
    for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
