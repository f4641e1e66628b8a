"""The table `quality`: results of expectations by check, and how far each suite has checked.

A check covers everything up to a version of silver; the next one of that suite goes on there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from watersmeet.core.columns import row_values
from watersmeet.lake import tables
from watersmeet.lake.table_reader import TableReader


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
