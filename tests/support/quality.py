"""A small lake whose data is as expected, the user's suites, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.support.cases import Case, heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.lakes import CaseLake
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.lake.location import Lake
from watersmeet.quality.check import Check, check
from watersmeet.quality.evaluate import Outcome, evaluate
from watersmeet.quality.rows import coordinates
from watersmeet.quality.suites import Suite, read_suites
from watersmeet.settings import Settings

NOW_MS = 1_800_000_000_000

Row = dict[str, Any]


def suite_file(folder: Path, name: str, table: str | None, *expectations: Mapping[str, Any]) -> str:
    """Writes a suite of the user."""
    meta = {} if table is None else {"table": table}
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"name": name, "meta": meta, "expectations": list(expectations)}))
    return str(file)


def expected(kind: str, sentence: str, **kwargs: Any) -> dict[str, Any]:
    return {"type": kind, "kwargs": kwargs, "description": sentence}


class QualityLake:
    """Two sources in one partition, with a refused record, a late one, and records that stay open.
    No Kafka, and no Spark.

    `more`: records of orders that come after these; `cases`: other records instead, by partition.
    """

    def __init__(
        self,
        folder: Path,
        more: Sequence[bytes | None] = (),
        cases: Mapping[int, Case] | None = None,
        **overrides: Any,
    ) -> None:
        values: dict[str, list[bytes | None]] = {
            "tracking": [
                keyed("a", 1_000),
                keyed("b", 1_010),
                b"{",
                keyed("a", 2_000),
                keyed("c", 1_500),
                heartbeat(3_000),
            ],
            "orders": [keyed("a", 1_020), keyed("b", 2_000), keyed("d", 3_000), *more],
        }
        arrivals = [
            "tracking",
            "orders",
            "tracking",
            "tracking",
            "tracking",
            "orders",
            "tracking",
            "tracking",
            "orders",
        ]
        arrivals += ["orders"] * len(more)
        self.settings: Settings = settings_for(folder, **overrides)
        self.engine = EmbeddedEngine(Lake(self.settings))
        self.lake = CaseLake(
            self.engine, self.settings, dict(cases or {0: Case(values, 100, arrivals)})
        )

    def flow(self, share: float = 1.0) -> None:
        self.lake.arrive(share)
        self.lake.merge()

    @property
    def suites(self) -> list[Suite]:
        return read_suites(self.settings)

    def check(self, now_ms: int = NOW_MS, **how: Any) -> Check:
        return check(self.engine, self.settings, self.suites, now_ms, **how)

    def looked_at(self, done: Check) -> dict[str, int]:
        """By table how many rows a check looked at."""
        return {result.table: result.rows for result in done.results}


def outcomes(rows: Any, suites: Sequence[Suite], table: str) -> list[Outcome]:
    """What becomes of all suites of a table on these rows."""
    mine = [suite for suite in suites if suite.table == table]
    names = coordinates(table, ("tenant", "topic"))
    return [outcome for of_suite in evaluate(rows, mine, names) for outcome in of_suite]


def failed(found: Sequence[Outcome]) -> dict[str, int | None]:
    return {outcome.expectation: outcome.unexpected for outcome in found if not outcome.success}


def with_rows(table: pa.Table, rows: Sequence[Row]) -> pa.Table:
    """A table of these rows with the columns of another one."""
    return pa.Table.from_pylist(list(rows), schema=table.schema)
