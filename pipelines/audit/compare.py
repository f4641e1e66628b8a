"""Whether a rebuild has the rows of the lake: `verify --against`. Reads only, and starts no JVM.

Both are read a group of partitions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from pipelines.audit.problems import Findings, answer, different
from pipelines.audit.verify_evidence import Evidence, groups, place, read_evidence
from pipelines.errors import ConfigurationError, WatersmeetError
from pipelines.lake import tables
from pipelines.lake.questions import Questions, Where
from pipelines.settings import Settings

OF_BATCH: Final = "rebuild.batch"
OF_TIMEOUT: Final = "merge.timeout"
"""What a rebuild notes of itself in its table `configuration`: the last batch that it repeats, and its timeout."""

Row = tuple[Any, ...]


def verify_against(here: Questions, there: Questions, settings: Settings, directory: Path) -> dict[str, Any]:
    """The answer of `verify --against --json`: silver and late, as they were when the rebuild `there` was made, against it in all
    columns but `batch`. Raises ConfigurationError where there is no rebuild, or one under another timeout.
    """
    batch = _rebuilt_batch(there, settings, directory)
    evidence = read_evidence(here, settings, 0)
    version = _version_after(evidence, batch)
    of_silver = [
        "partition",
        "merge_key",
        "event_time",
        "last_event_time",
        "status",
        *settings.sources,
        "valid",
        "invalid_reason",
    ]
    of_late = ["partition", "source", "offset", "merge_key", "event_time", "position", "value"]
    in_silver, in_late = Findings("silver"), Findings("late")
    for first, until in groups(1 + max((tp.partition for tp in evidence.eras[-1].until), default=-1)):
        mine = [("partition", ">=", first), ("partition", "<", until)]
        rows = _rows(here, tables.SILVER, of_silver, [mine], version), _rows(there, tables.SILVER, of_silver, [mine])
        for key, one, other in different(*rows, itemgetter(slice(3))):
            in_silver.add(_told(one, other, of_silver), place(*key))
        noted = [[*mine, ("batch", "<=", batch)]]
        rows = _rows(here, tables.LATE, of_late, noted), _rows(there, tables.LATE, of_late, [mine])
        for (partition, source, offset), one, other in different(*rows, itemgetter(slice(3))):
            in_late.add(_told(one, other, of_late), f"late: {settings.sources[source].topic}[{partition}]@{offset}")
    return answer([in_silver, in_late])


def _rebuilt_batch(rebuilt: Questions, settings: Settings, directory: Path) -> int:
    facts: dict[str, str] = {}
    if rebuilt.exists(tables.CONFIGURATION):
        found = rebuilt.select(tables.CONFIGURATION, ["field", "value"])
        facts = dict(zip(found["field"].to_pylist(), found["value"].to_pylist(), strict=True))
    if OF_BATCH not in facts:
        raise ConfigurationError(f"--against: {directory} holds no complete rebuild; `watersmeet rebuild --into DIR` makes one")
    if facts[OF_TIMEOUT] != f"{settings.merge.timeout_ms} ms":
        raise ConfigurationError(
            f"--against: {directory} was derived with a timeout of {facts[OF_TIMEOUT]}, which makes other merge records; "
            "rebuild without --timeout"
        )
    return int(facts[OF_BATCH])


def _version_after(evidence: Evidence, batch: int) -> int | None:
    """The version of silver right after a batch; None: the last."""
    if evidence.last_batch == batch:
        return evidence.version
    values = {"version": ("max", "silver_version")}
    [row] = evidence.questions.summary(tables.PROGRESS, [], values, [[("batch", "=", batch)]]).to_pylist()
    if row["version"] is None:
        raise WatersmeetError(f"it is not known which version of silver batch {batch} made; rebuild anew")
    return int(row["version"])


def _rows(questions: Questions, table: str, columns: list[str], where: Where, version: int | None = None) -> Iterator[Row]:
    """Rows whose first three columns say which they are, nested values as their text."""
    if not questions.exists(table):
        return iter(())
    found = questions.select(table, columns, where, version=version)
    return zip(*(map(repr, c.to_pylist()) if pa.types.is_nested(c.type) else c.to_pylist() for c in found.columns), strict=True)


def _told(here: list[Row], there: list[Row], names: list[str]) -> str:
    if not here or not there:
        return "the rebuild does not have it" if here else "only the rebuild has it"
    differing = [name for i, name in enumerate(names) if [row[i] for row in here] != [row[i] for row in there]]
    return f"the rebuild has another {', '.join(differing)}"
