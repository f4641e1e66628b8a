"""Measures the chosen points (all, without a choice), prints them with their marks, and keeps them
as JSON.

python -m benchmarks                      every point
python -m benchmarks 1 8 --records 550000
python -m benchmarks --scale 0.02 --warm-up 20 --seconds 10 --rounds 4   to see whether all works
python -m benchmarks --full --engine embedded
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import backlog, batches, corrections, latency, machine, start
from benchmarks.points import ENGINES, KINDS, Result, Sizes, print_results
from benchmarks.programs import ProgramError, notify


def main() -> None:
    """Parses, measures, prints; exit status 1 where something could not be measured."""
    options = _parse()
    sizes = _sizes(options)
    # What was started is ended in `finally` blocks, which a signal would pass over.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    document: dict[str, Any] = {
        "machine": machine.describe(),
        "arguments": shlex.join(sys.argv[1:]),
        "taken_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "sizes": asdict(sizes),
        "results": [],
    }
    results: list[Result] = []
    failed = False
    try:
        with tempfile.TemporaryDirectory(
            prefix="watersmeet-bench-", ignore_cleanup_errors=True
        ) as name:
            # Last come those that start Spark in this process, where it stays.
            for measured in (backlog, latency, start, corrections, batches):
                try:
                    for result in measured.measure(set(options.points), sizes, Path(name)):
                        results.append(result)
                        document["results"].append(result.document())
                        options.out.write_text(json.dumps(document, indent=2) + "\n")
                except ProgramError as error:
                    notify(f"not measured: {error}")
                    failed = True
    finally:
        print_results(results, document)
    sys.exit(1 if failed else 0)


def _parse() -> argparse.Namespace:
    defaults = Sizes()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "points", metavar="POINT", type=int, nargs="*", help="1 to 13; without any, all of them"
    )
    parser.add_argument(
        "--engine", choices=ENGINES, help="what is measured; without one, both in turns"
    )
    parser.add_argument("--input", choices=KINDS, help="of points 1, 2 and 6; without one, both")
    parser.add_argument(
        "--records", type=int, default=defaults.records, help="records of the backlog (%(default)s)"
    )
    parser.add_argument(
        "--closed-rows",
        type=int,
        default=defaults.closed_rows,
        help="closed rows of point 11, 10,000 or more (%(default)s)",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="ten times the records for point 6, 20 million rows for point 4",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="so much of every number of records and rows (%(default)s)",
    )
    parser.add_argument(
        "--partitions",
        type=int,
        default=defaults.partitions,
        help="partitions of a topic (%(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=defaults.rounds,
        help="batches of points 3, 4 and 11 (%(default)s)",
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        default=defaults.warm_up_s,
        help="seconds before point 2 (%(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=defaults.measured_s,
        help="seconds of point 2 (%(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results.json"), help="where the JSON goes (%(default)s)"
    )
    options = parser.parse_args()
    if not set(options.points) <= set(range(1, 14)):
        parser.error("the points are 1 to 13")
    options.points = options.points or list(range(1, 14))
    return options


def _sizes(options: argparse.Namespace) -> Sizes:
    sizes = replace(
        Sizes(),
        engines=ENGINES if options.engine is None else (options.engine,),
        kinds=KINDS if options.input is None else (options.input,),
        records=options.records,
        partitions=options.partitions,
        closed_rows=options.closed_rows,
        rounds=options.rounds,
        warm_up_s=options.warm_up,
        measured_s=options.seconds,
    )
    return (sizes.full() if options.full else sizes).scaled(options.scale)


if __name__ == "__main__":
    main()
