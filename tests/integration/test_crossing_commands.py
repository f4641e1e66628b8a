"""Commands that cross: whoever changes a lake knows first that there is something to do, and keeps
out whoever still sends by what was there before.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import heartbeat, keyed
from tests.support.commands import in_process
from tests.support.fault_points import IN_EVOLVE
from tests.support.repartitioning import confluence
from tests.support.rivers import River
from tests.support.topics import consume, produce
from watersmeet.audit.validate import check_keys
from watersmeet.core.repartition import murmur2
from watersmeet.errors import ConfigurationError, FencedError, LeaseTakenError
from watersmeet.lake import tables
from watersmeet.lake.history import read_history
from watersmeet.lake.lease import FORGET
from watersmeet.monitoring.observability import Reporter
from watersmeet.operations.evolve import evolve
from watersmeet.operations.forget import forgotten
from watersmeet.operations.redrive import Redrive
from watersmeet.repartition.command import repartition
from watersmeet.run import LAYERS, Run

REFUSED = b'{"k":"forgotten","ts":"soon"}'


def name_of(request: pytest.FixtureRequest) -> str:
    return re.sub(r"[^a-z0-9]+", "-", request.node.name)[-60:].strip("-")


@pytest.fixture
def crossing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], None]:
    """Has something happen where a publisher reaches a point, the first time."""

    def cross(point: str, happens: Callable[[], object]) -> None:
        def fault_point(reached: str) -> None:
            """What happens publishes, too, and is not crossed itself."""
            if reached == point:
                monkeypatch.setattr("watersmeet.kafka.publisher.fault_point", lambda _: None)
                happens()

        monkeypatch.setattr("watersmeet.kafka.publisher.fault_point", fault_point)

    return cross


# -- nothing to do, or refused


@pytest.mark.promise("O15")
@pytest.mark.fault("owners")
@pytest.mark.long
def test_a_command_that_changes_nothing_leaves_a_run_its_layers(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "leaves-layers", partitions=1)
    river.flow()
    river.finish()
    entries = set(river.reader.select(tables.LEASES, ["entry"])["entry"].to_pylist())
    (tmp_path / "schema.json").write_text(
        '{"type": "object", "properties": {"n": {"type": "nonsense"}}}'
    )
    another: dict[str, Any] = {"name": "another-name", "merge": {"timeout": "1h"}}
    wrong = {**river.config["sources"]["orders"], "schema": "schema.json"}
    before = dict(river.config)
    with Run(river.settings, LAYERS, Reporter()).take_layers() as owned:
        for words, status, config in (
            ("evolve --apply", 0, {}),
            ("evolve --apply", 2, {"sources": {**before["sources"], "orders": wrong}}),
            ("evolve --apply", 2, another),
            ("forget a --apply", 2, {"name": "another-name"}),
            ("forget nobody --apply", 0, {}),
            ("reset --to latest --json", 0, {}),
            ("forget a --apply --tenant x", 2, {}),
        ):
            river.config = {**before, **config}
            river.write()
            done = in_process(*words.split(), "-c", river.file, cwd=river.folder)
            assert done.returncode == status, done.stdout + done.stderr
            owned.raise_if_lost()
    after = set(river.reader.select(tables.LEASES, ["entry"])["entry"].to_pylist())
    assert len(after) == len(entries) + 2, "taken and released, by the run"


# -- redrive beside forget


@pytest.fixture
def refused(kafka: str, tmp_path: Path, request: pytest.FixtureRequest) -> River:
    """A lake with a refused record of the key, and one of another key behind it."""
    river = River.make(kafka, tmp_path, name_of(request), partitions=1)
    for value in (REFUSED, b'{"k":"another","ts":"soon"}'):
        river.send("tracking", 0, value)
    river.finish()
    return river


def redrive(river: River) -> int:
    return int(Redrive(river.reader, river.settings, "no_event_time").run(apply=True)["sent"])


def sent_again(river: River) -> list[bytes | None]:
    found = consume(river.kafka, river.topic("tracking"), 1)
    return [m.value() for m in found if "watersmeet.redriven" in dict(m.headers() or [])]


@pytest.mark.promise("N27")
@pytest.mark.fault("owners")
@pytest.mark.parametrize(
    "point",
    [
        pytest.param("publisher.begin", marks=pytest.mark.long),
        pytest.param("publisher.produce", marks=pytest.mark.long),
        "publisher.commit",
    ],
)
def test_what_is_forgotten_while_it_is_redriven_is_not_sent(
    refused: River, crossing: Callable[[str, Callable[[], object]], None], point: str
) -> None:
    crossing(point, lambda: forgotten(refused.settings, "forgotten", Reporter()))
    with pytest.raises(FencedError):
        redrive(refused)
    assert sent_again(refused) == []
    assert redrive(refused) == 1
    assert sent_again(refused) == [b'{"k":"another","ts":"soon"}']


@pytest.mark.promise("N27")
@pytest.mark.fault("owners")
@pytest.mark.long
def test_nothing_is_redriven_while_a_key_is_being_forgotten(refused: River) -> None:
    with (
        Run(refused.settings, LAYERS, Reporter(), change=FORGET).take_layers(),
        pytest.raises(LeaseTakenError, match="`watersmeet forget` has it for a moment"),
    ):
        redrive(refused)
    assert sent_again(refused) == []
    assert redrive(refused) == 2


# -- repartition beside evolve


def repartition_once(river: River) -> int:
    return sum(
        row["records"]
        for row in repartition(river.settings, Reporter(), threading.Event(), once=True)
    )


def pairs(river: River, begin: int) -> None:
    """Sends twenty records to each source that are pairs by one field, and by another one, too."""
    for source in ("tracking", "orders"):
        origin = river.config["sources"][source]["repartition"]["from"]
        records: list[tuple[int, bytes | None]] = [
            (0, keyed(f"k{n}", begin + n, id=f"id {n}")) for n in range(20)
        ]
        produce(river.kafka, origin, [*records, (0, heartbeat(begin + 20))])


def by_id(river: River) -> None:
    """Has the records keyed by the other field."""
    for source in ("tracking", "orders"):
        river.config["sources"][source]["key"] = "id"
    river.write()


@pytest.fixture
def repartitioned(kafka: str, tmp_path: Path, request: pytest.FixtureRequest) -> River:
    """Repartitioned and merged once."""
    river = confluence(kafka, tmp_path, name_of(request), (1, 1), 3)
    pairs(river, 0)
    repartition_once(river)
    river.finish()
    return river


def halves(river: River) -> list[Any]:
    """The merge records that lack the part of one of the sources."""
    rows = river.reader.select(
        tables.MERGED, ["merge_key", "partition", "tracking", "orders"]
    ).to_pylist()
    return [row for row in rows if not (row["tracking"] and row["orders"])]


@pytest.mark.promise("C33")
@pytest.mark.fault("rules")
@pytest.mark.long
def test_repartition_follows_no_other_rules_than_the_lake(repartitioned: River) -> None:
    pairs(repartitioned, 1000)
    by_id(repartitioned)
    with pytest.raises(
        ConfigurationError,
        match=r"^sources\.tracking\.key: the lake has other rules than this configuration",
    ):
        repartition_once(repartitioned)
    repartitioned.config["merge"]["timeout"] = "1h"  # which says nothing of where records go
    for source in ("tracking", "orders"):
        repartitioned.config["sources"][source]["key"] = "k"
    repartitioned.write()
    assert repartition_once(repartitioned) == 42


@pytest.mark.promise("C33")
@pytest.mark.fault("owners", "rules")
@pytest.mark.long
def test_every_pair_meets_although_the_key_changes_while_records_are_repartitioned(
    repartitioned: River, crossing: Callable[[str, Callable[[], object]], None]
) -> None:
    pairs(repartitioned, 1000)
    repartition_once(repartitioned)  # by the old key, and not read yet
    pairs(repartitioned, 2000)
    before = repartitioned.settings
    by_id(repartitioned)

    def change() -> None:
        assert evolve(repartitioned.reader, repartitioned.settings, Reporter())["applied"]

    crossing("publisher.commit", change)
    with pytest.raises((FencedError, ConfigurationError)):
        repartition(before, Reporter(), threading.Event(), once=True)
    with pytest.raises(
        ConfigurationError, match="the lake has other rules than this configuration"
    ):
        repartition(before, Reporter(), threading.Event(), once=True)
    repartition_once(repartitioned)
    pairs(repartitioned, 3000)
    repartition_once(repartitioned)
    assert check_keys(repartitioned.settings, repartitioned.reader)[0] == []
    repartitioned.finish()
    assert halves(repartitioned) == []
    assert repartitioned.broken_promises() == []
    found = repartitioned.reader.select(tables.MERGED, ["merge_key"])["merge_key"].to_pylist()
    assert sum(key.startswith("k") for key in found) == 40, (
        "the records of before are read by the rules of before"
    )


@pytest.mark.promise("C33")
@pytest.mark.fault("rules")
@pytest.mark.long
def test_a_record_that_belongs_elsewhere_by_a_later_key_is_not_redriven(
    repartitioned: River,
) -> None:
    origin = repartitioned.config["sources"]["tracking"]["repartition"]["from"]
    keys = [
        n for n in range(20) if murmur2(f"k{n}".encode()) % 3 != murmur2(f"id {n}".encode()) % 3
    ]
    produce(
        repartitioned.kafka,
        origin,
        [(0, b'{"k":"k%d","id":"id %d","ts":"soon"}' % (keys[0], keys[0]))],
    )
    repartition_once(repartitioned)
    repartitioned.finish()
    by_id(repartitioned)
    evolve(repartitioned.reader, repartitioned.settings, Reporter())
    with pytest.raises(
        ConfigurationError,
        match=f"its key belongs to another partition now; send such records to {origin}",
    ):
        redrive(repartitioned)


@pytest.mark.promise("C33")
@pytest.mark.fault("owners", "rules")
@pytest.mark.long
def test_nothing_is_repartitioned_while_the_rules_change(repartitioned: River) -> None:
    pairs(repartitioned, 1000)
    with (
        Run(repartitioned.settings, LAYERS, Reporter(), change="evolve").take_layers(),
        pytest.raises(LeaseTakenError, match="`watersmeet evolve` has it for a moment"),
    ):
        repartition_once(repartitioned)
    assert repartition_once(repartitioned) == 42


@pytest.mark.promise("C33")
@pytest.mark.fault("kill", "rules")
@pytest.mark.long
def test_an_evolve_that_was_cut_short_holds_repartition_up_until_it_is_called_again(
    repartitioned: River,
) -> None:
    pairs(repartitioned, 1000)
    repartitioned.config["merge"]["timeout"] = "1h"
    repartitioned.write()
    crashed = repartitioned.run("--apply", command="evolve", point=IN_EVOLVE[1])
    crashed.await_held()
    crashed.kill()
    with pytest.raises(LeaseTakenError, match="call it again if it was cut short"):
        repartition_once(repartitioned)
    assert evolve(repartitioned.reader, repartitioned.settings, Reporter())["changes"] == []
    assert repartition_once(repartitioned) == 42


# -- a lake that has nothing yet


def nothing_read(kafka: str, folder: Path, name: str) -> River:
    """One whose lake has read nothing, and that wants another timeout now."""
    river = River.make(kafka, folder, name, partitions=1)
    river.finish()
    river.config["merge"]["timeout"] = "150ms"
    river.write()
    return river


@pytest.mark.nightly
@pytest.mark.promise("C5")
@pytest.mark.fault("rules")
@pytest.mark.long
def test_a_lake_that_has_read_nothing_takes_other_rules_without_evolve(
    kafka: str, tmp_path: Path
) -> None:
    river = nothing_read(kafka, tmp_path, "nothing-yet")
    river.config["publish"]["max_bytes"] = "900kB"
    river.write()
    assert in_process("validate", "-c", river.file, cwd=river.folder).returncode == 0
    with pytest.raises(
        ConfigurationError, match="the lake has other rules than this configuration"
    ):
        river.finish("bronze")  # another process may have the other layers
    river.finish()
    river.flow()
    river.finish()
    assert [
        epoch.settings.publish.max_bytes
        for epoch in read_history(river.reader, river.settings).epochs
    ][1:] == [900_000]
    assert river.broken_promises() == []
    river.config["publish"]["max_bytes"] = "800kB"
    river.write()
    with pytest.raises(
        ConfigurationError,
        match=r"^publish\.max_bytes: the lake has other rules than this configuration",
    ):
        river.finish()


@pytest.mark.promise("C5")
@pytest.mark.fault("rules")
@pytest.mark.long
def test_what_such_a_lake_reads_at_once_is_read_by_its_new_rules_alone(
    kafka: str, tmp_path: Path
) -> None:
    """So that it is taken up from its sink, should it be lost."""
    river = nothing_read(kafka, tmp_path, "nothing-before")
    river.flow()
    river.finish()
    headers = [dict(message.headers()) for message in consume(kafka, river.sink, 1)]
    rules = {each["watersmeet.rules"] for each in headers if "watersmeet.rules" in each}
    assert rules == {river.settings.fingerprint.encode()}
