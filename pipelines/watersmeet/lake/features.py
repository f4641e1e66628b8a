"""Table features that somebody else has turned on: a platform by itself, or a person.

A feature that the engine cannot handle is refused.
"""

from __future__ import annotations

from typing import Final

from watersmeet.errors import ConfigurationError
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader

_REMOVED_BY: Final = {
    "inCommitTimestamp": ["inCommitTimestamp"],
    "rowTracking": ["rowTracking", "domainMetadata"],
}
"""Features that Spark can drop at once, so that delta-rs writes the table again.

Each comes with the features to drop for it.
"""


def check_features(reader: TableReader, lake: Lake) -> None:
    """Raise ConfigurationError where the engine cannot read or write a feature of a table."""
    for table in filter(reader.exists, lake.layout):
        check_features_of(reader, lake, table)


def check_features_of(reader: TableReader, lake: Lake, table: str) -> None:
    """Raise ConfigurationError where the engine cannot read or write a feature of this table.

    Spark writes what delta-rs cannot. On either engine, delta-rs must be able to read the table.
    """
    is_embedded = lake.settings.engine == "embedded"
    unknown = reader.unknown_features(table, for_writing=is_embedded)
    if not unknown:
        return
    feature = next((name for name in unknown if name in _REMOVED_BY), unknown[0])
    name = f"delta.`{lake.address(table)}`"
    removed = _REMOVED_BY.get(feature, ())
    statements = [f"ALTER TABLE {name} DROP FEATURE {dropped}" for dropped in removed]
    ways = ["; ".join(statements)] if statements else []
    ways += (
        ["go on with `engine: spark`"]
        if is_embedded
        else ["restore the table to before", "read it in a catalog"]
    )
    raise ConfigurationError(
        f"{table} has the table feature {feature}, which somebody has turned on and delta-rs "
        f"cannot {('write' if is_embedded else 'read')}: {', or '.join(ways)}",
        where="lake",
    )
