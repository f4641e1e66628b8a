"""Checks silver by Great Expectations: `python resources/check_silver.py watersmeet.yml`, or a task of the job `quality`.

Prints each expectation with the rows that break it. Exit status 0: all hold; 3: one does not; 1 or 2: it could not be checked.
"""

import sys
from pathlib import Path

from pipelines.engine.choice import open_engine
from pipelines.errors import WatersmeetError
from pipelines.lake import tables
from pipelines.quality import check_silver
from pipelines.settings import load_settings


def main(config: str) -> int:
    """The exit status; the table is only read."""
    try:
        settings = load_settings(Path(config))
        engine = open_engine(settings)
        results = check_silver(engine.read(tables.SILVER, engine.lake.layout[tables.SILVER].schema.names), settings)
    except WatersmeetError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    for result in results:
        sys.stdout.write(f"{'holds' if result.ok else f'BROKEN by {result.unexpected} rows'}: {result.expectation}\n")
    return 0 if all(result.ok for result in results) else 3


if __name__ == "__main__" and (status := main(*sys.argv[1:])):
    sys.exit(status)
