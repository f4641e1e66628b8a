"""Table features that somebody else has turned on: a platform by itself, or a person.

A feature that the engine cannot handle is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from watersmeet.errors import ConfigurationError, Problem, raise_first
from watersmeet.lake import tables
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader

_REMOVED_BY: Final = {
    "inCommitTimestamp": ["inCommitTimestamp"],
    "rowTracking": ["rowTracking", "domainMetadata"],
}
"""Features that Spark can drop at once, so that delta-rs writes the table again.

Each comes with the features to drop for it.
"""

_APPEND_ONLY: Final = "delta.appendOnly"
_CONSTRAINTS: Final = "delta.constraints."
_MATTERS: Final = {
    _APPEND_ONLY: "no row can be changed or deleted, so that `keep` and `forget` fail",
    "delta.enableChangeDataFeed": "every change is written twice, and what `forget` erases stays "
    "in the change data until a vacuum",
}
_MATTERS_LATER: Final = dict.fromkeys(
    ["delta.columnMapping.mode", "delta.enableRowTracking"],
    "`engine: embedded`, which could take the lake over, cannot write it",
)
"""What follows from a property that Watersmeet does not set; for the latter where Spark writes a
lake that both engines can.
"""

_OFF: Final = ("false", "none")
_RETENTION: Final = {
    "delta.deletedFileRetentionDuration": "a vacuum deletes files that time travel, a check or a "
    "reader still needs",
    "delta.logRetentionDuration": "earlier versions cannot be read as long",
}
_UNITS_MS: Final = {
    "millisecond": 1,
    "second": 1000,
    "minute": 60_000,
    "hour": 3_600_000,
    "day": 86_400_000,
    "week": 604_800_000,
}


def interval_ms(text: str) -> int | None:
    """Return the length of an interval as Delta's properties have it, such as `interval 7 days`.

    None where it is another text.
    """
    parts = re.findall(r"(\d+)\s*([a-z]+?)s?\b", text.lower().removeprefix("interval"))
    if not parts or any(unit not in _UNITS_MS for _, unit in parts):
        return None
    return sum(int(count) * _UNITS_MS[unit] for count, unit in parts)


def check_features(
    reader: TableReader,
    lake: Lake,
    names: Iterable[str] | None = None,
    *,
    changed: Collection[str] = (),
) -> None:
    """Raise ConfigurationError where the engine cannot read or write a feature of a table.

    Spark writes what delta-rs cannot. On either engine, delta-rs must be able to read the table.
    `names`: the tables to look at; all without. `changed`: those whose rows are to
    be changed, beside silver's.
    """
    existing = filter(reader.exists, lake.layout if names is None else names)
    unusable = (
        _unusable(reader, lake, table, table in {tables.SILVER, *changed}) for table in existing
    )
    raise_first(error for error in unusable if error is not None)


def _unusable(
    reader: TableReader, lake: Lake, table: str, is_changed: bool
) -> ConfigurationError | None:
    if is_changed and reader.properties(table).get(_APPEND_ONLY) == "true":
        of_silver = "no batch can change a row"
        consequence = of_silver if table == tables.SILVER else _MATTERS[_APPEND_ONLY]
        return ConfigurationError(
            f"{table} has {_APPEND_ONLY}=true, which somebody has set: {consequence}",
            where="lake",
            fix=f"{alter(lake, table)} UNSET TBLPROPERTIES ('{_APPEND_ONLY}')",
        )
    is_embedded = lake.settings.engine == "embedded"
    unknown = reader.unknown_features(table, for_writing=is_embedded)
    if not unknown:
        return None
    feature = next((name for name in unknown if name in _REMOVED_BY), unknown[0])
    removed = _REMOVED_BY.get(feature, ())
    statements = [f"{alter(lake, table)} DROP FEATURE {dropped}" for dropped in removed]
    ways = ["; ".join(statements)] if statements else []
    ways += (
        ["go on with `engine: spark`"]
        if is_embedded
        else ["restore the table to before", "read it in a catalog"]
    )
    return ConfigurationError(
        f"{table} has the table feature {feature}, which somebody has turned on and delta-rs "
        f"cannot {('write' if is_embedded else 'read')}: {', or '.join(ways)}",
        where="lake",
    )


def touched(reader: TableReader, lake: Lake) -> Iterator[Problem]:
    """Yield a problem for each property that somebody has put on a table and that matters.

    A run goes on with them, as long as every row passes the constraints.
    """
    is_for_both = lake.settings.engine == "spark" and not lake.is_catalog
    matters = _MATTERS | (_MATTERS_LATER if is_for_both else {})
    for table in filter(reader.exists, lake.layout):
        for key, value in sorted(reader.properties(table).items()):
            if key not in lake.layout[table].properties or key in _RETENTION:
                yield from _of_property(lake, table, key, value, matters.get(key))


def _of_property(
    lake: Lake, table: str, key: str, value: str, consequence: str | None
) -> Iterator[Problem]:
    if key.startswith(_CONSTRAINTS):
        constraint = key.removeprefix(_CONSTRAINTS)
        yield Problem(
            f"{table} has the constraint {constraint}, `{value}`, which somebody has added: a "
            "batch with a row that does not pass it stops the run",
            "lake",
            f"{alter(lake, table)} DROP CONSTRAINT {constraint}, and make it an expectation "
            "(`quality.suites`)",
        )
    elif consequence is not None and value.lower() not in _OFF:
        yield Problem(
            f"{table} has {key}={value}, which somebody has set: {consequence}",
            "lake",
            f"{alter(lake, table)} UNSET TBLPROPERTIES ('{key}')",
        )
    elif key in _RETENTION and (interval_ms(value) or lake.settings.retention_ms) < (
        lake.settings.retention_ms
    ):
        yield Problem(
            f"{table} has {key}={value}, which is less than `retention`: {_RETENTION[key]}",
            "lake",
            "let `watersmeet maintain` set it, and vacuum the table with nothing else",
        )


def alter(lake: Lake, table: str) -> str:
    """Return how a statement of SQL begins that changes a table, for Spark."""
    address = lake.address(table)
    is_in_catalog = lake.owning_lake(table).is_catalog
    return f"ALTER TABLE {address if is_in_catalog else f'delta.`{address}`'}"
