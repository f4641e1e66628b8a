"""The table `quality`: results of expectations by check, and how far each suite has checked.

A check covers everything up to a version of silver; the next one of that suite goes on there.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

from watersmeet.core.columns import row_values
from watersmeet.errors import WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.commits import Append, Commit, suppress_conflict
from watersmeet.lake.table_reader import TableReader, walk
from watersmeet.lake.tables import Table

_APPLICATION: Final = "watersmeet-quality"
_ATTEMPTS: Final = 20


class Checked(NamedTuple):
    """A row of `quality`; times in epoch ms."""

    checked_at: int
    suite: str
    table: str
    version: int
    expectation: str
    success: bool
    unexpected: int | None
    total: int


def last_versions(reader: TableReader) -> dict[tuple[str, str], int]:
    """Return, by suite and table, the version of silver up to which the suite has checked.

    Empty where the table does not exist.
    """
    if not reader.exists(tables.QUALITY):
        return {}
    rows = reader.summary(
        tables.QUALITY, ["suite", "table"], {"version": ("max", "version")}
    ).to_pylist()
    return {(row["suite"], row["table"]): row["version"] for row in rows}


def last_results(reader: TableReader) -> list[dict[str, Any]]:
    """Return the results of the last check of each suite and table.

    - `suite`, `table`, `version`, `checked_at` (epoch ms), `success`.
    - `expectations`: how many there are.
    - `failed`: how many of them failed.
    """
    if not reader.exists(tables.QUALITY):
        return []
    by = ["suite", "table"]
    last = reader.summary(tables.QUALITY, by, {"at": ("max", "checked_at")})
    latest = [[("checked_at", "in", sorted({*last["at"].to_pylist()}))]]
    columns = [*by, "checked_at", "version", "success"]
    rows = list(row_values(reader.select(tables.QUALITY, columns, latest), *columns))
    results = list[dict[str, Any]]()
    for check in sorted(row_values(last, *by, "at")):
        outcomes = [(version, success) for *of, version, success in rows if (*of,) == check]
        failed = sum(not success for _, success in outcomes)
        results.append(
            {
                "suite": check[0],
                "table": check[1],
                "version": outcomes[0][0],
                "checked_at": check[2],
                "success": not failed,
                "expectations": len(outcomes),
                "failed": failed,
            }
        )
    return results


def append_results(
    reader: TableReader, append: Append, table: Table, results: Sequence[Checked]
) -> None:
    """Append the results of one check in one commit; several processes may do so at once.

    The commit's number is that of the version that it is to make. So of two checks that end
    together, Delta skips the later one, or finds it in conflict, and that one tries again.
    """
    check_id = uuid.uuid4().hex
    rows = table.rows(results)
    for _ in range(_ATTEMPTS):
        number = reader.version(table.name) + 1
        with suppress_conflict():
            append(table.name, rows, Commit(_APPLICATION, 0, number, {"check": check_id}))
        if check_id in _checks_since(reader, table.name, number):
            return
    raise WatersmeetError(
        f"results cannot be added to the table {table.name}: other checks were quicker each time",
        fix="try again",
    )


def _checks_since(reader: TableReader, table: str, number: int) -> list[str]:
    new = takewhile(lambda version: version.number >= number, walk(reader, table))
    commits = [Commit.parse(version.metadata) for version in new]
    return [str(commit.facts.get("check")) for commit in commits if commit is not None]
