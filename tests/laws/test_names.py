"""A source may have any name that a configuration takes: no column, of any table or of a step
between, is mistaken for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.laws.conftest import QUICK, MakeLake, in_folders
from tests.support.cases import Case, expected_late, expected_silver, heartbeat, keyed
from tests.support.configurations import settings_for
from watersmeet.configuration.values import NAMES_OF_STEPS
from watersmeet.core.merge import REPLACING
from watersmeet.errors import ConfigurationError
from watersmeet.lake.location import Lake
from watersmeet.settings import Settings, load_settings

pytestmark = [pytest.mark.promise("C23"), pytest.mark.fault("hostile")]

WORDS = {
    "changed",
    "kept",
    "input",
    "c0",
    "c1",
    "row",
    "rows",
    "news",
    "select",
    "order",
    "group",
    "table",
    "null",
    "true",
}
"""Names of SQL, and of what our own statements and steps call their tables and columns."""

TENANTS = {"timeout": "1s", "tenant": "g", "tenant_max_lag": "1s"}
KINDS: list[dict[str, Any]] = [
    {"merge": merge}
    for merge in ({"timeout": "1s"}, {"window": {"gap": "1s", "max": "2s"}}, TENANTS)
]


def settings_of(*names: str, **overrides: Any) -> Settings:
    return settings_for(Path("/nowhere"), sources=names, **overrides)


def every_column() -> set[str]:
    """The names of the columns of all tables, of any kind of lake, and of the merge's own."""
    lakes = [Lake(settings_of("tracking", "orders", **kind)) for kind in KINDS]
    names = {
        name for lake in lakes for table in lake.layout.values() for name in table.schema.names
    }
    return {*names, *REPLACING, *WORDS} - {"tracking", "orders"}


def is_taken(name: str, **kind: Any) -> bool:
    """Whether a configuration takes it as the name of a source."""
    try:
        settings_of(name, "another", **kind)
    except ValueError:
        return False
    return True


@in_folders
def test_sources_named_like_any_column_are_merged_as_the_model_does(
    new_lake: MakeLake, kind: str
) -> None:
    names = sorted(filter(is_taken, every_column()))
    if kind != QUICK:  # one of each type beside the others, and those that other steps know
        names = [
            name for name in names if name in {"heartbeat", "headers", "kafka_timestamp", *WORDS}
        ]
    assert {"heartbeat", "headers", "kafka_timestamp"} <= {*names}
    values: dict[str, list[bytes | None]] = {}
    arrivals: list[str] = []
    for n, name in enumerate(names):
        records = [keyed("ab"[i % 2], 60 * i + n % 7, n=n) for i in range(6)]
        values[name] = [*records, keyed("a", 20, n=n), heartbeat(1000)]
        arrivals += [name] * len(values[name])
    lake = new_lake({0: Case(values, 100, arrivals)}, sources=names)
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
    assert lake.silver() == expected_silver(lake.cases, names)
    assert lake.late() == expected_late(lake.cases, names)


@pytest.mark.long
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_with_tenants_too(new_lake: MakeLake, kind: str) -> None:
    """Other columns go from step to step."""
    names = sorted(name for name in every_column() if is_taken(name, **KINDS[2]))
    values = {name: [keyed("a", 10, g="x"), heartbeat(5000, g="x")] for name in names}
    case = Case(
        {name: [*mine] for name, mine in values.items()},
        1000,
        [name for name in names for _ in range(2)],
    )
    lake = new_lake({0: case}, sources=names, **KINDS[2])
    lake.arrive()
    lake.merge()
    [row] = lake.silver()
    assert (row[1], row[2], [len(parts) for parts in row[5:]]) == (  # type: ignore[arg-type]
        "a",
        "timed_out",
        [1] * len(names),
    )


@pytest.mark.parametrize("name", sorted(NAMES_OF_STEPS))
def test_what_is_reserved_is_refused_when_a_configuration_is_read(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "watersmeet.yml"
    sources = "".join(
        f"  {source}: {{topic: {source}, event_time: ts}}\n" for source in (name, "orders")
    )
    file.write_text(
        "name: shop\nlake: ./lake\nkafka: {bootstrap_servers: 127.0.0.1:1}\nmerge: {timeout: "
        "1s}\npublish: {topic: merged}\n"
        f"sources:\n{sources}"
    )
    with pytest.raises(ConfigurationError, match=f"sources.{name}: `{name}` is reserved"):
        load_settings(file)


def test_columns_of_silver_and_of_the_merge_are_refused_whatever_the_rules() -> None:
    names = (*REPLACING, "due", "closed_at", "tenant", "position")
    assert not any(is_taken(name, **kind) for name in names for kind in KINDS)
