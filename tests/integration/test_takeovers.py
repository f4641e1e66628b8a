"""Whoever takes layers over fences the owner before, whatever became of that one and of takeovers
in between."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.cases import SOURCES
from tests.support.rivers import Losses, River
from watersmeet.core.sequence import MERGED
from watersmeet.cycle import Cycle
from watersmeet.errors import ConfigurationError, LeaseLostError
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.lake.lease import FORGET, Lease
from watersmeet.lake.maintenance import maintain
from watersmeet.lake.published import last_sink, sink_of
from watersmeet.monitoring.observability import Reporter
from watersmeet.operations import evolve as evolving
from watersmeet.operations.evolve import evolve
from watersmeet.operations.forget import forgotten
from watersmeet.run import LAYERS, Run
from watersmeet.running.bronze_table import BatchCounts, BronzeTable, kafka_input
from watersmeet.running.owner import kept_by

KEEP = {"bronze": "1500ms", "silver": "2500ms", "late": "1500ms", "quarantine": "1s"}


@pytest.fixture
def every_owner_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for silence: as where the owner before was killed, and a takeover between it and
    the next one, too."""
    monkeypatch.setattr("watersmeet.run.Lease", partial(Lease, is_dead=lambda _: True))


def new_run(river: River) -> Run:
    return Run(river.settings, LAYERS, Reporter())


@contextmanager
def replaced(run: Run) -> Iterator[Cycle]:
    """A run that owns the layers, until it finds that it does not."""
    with (
        pytest.raises(LeaseLostError, match="this one is fenced and writes nothing more"),
        run.take_layers() as owned,
    ):
        yield owned


def offsets_of(river: River, source: str) -> Counter[tuple[int, int]]:
    found = river.reader.select(tables.bronze(source), ["partition", "offset"])
    return Counter(zip(found["partition"].to_pylist(), found["offset"].to_pylist(), strict=True))


def rows_in(river: River, *names: str) -> dict[str, int]:
    return {
        name: river.reader.summary(name, [], {"n": ("count", "*")})["n"][0].as_py()
        for name in names
    }


@pytest.mark.promise("O11")
@pytest.mark.fault("owners", "kill")
@pytest.mark.long
@pytest.mark.usefixtures("every_owner_counts_as_dead")
def test_a_takeover_that_ends_before_it_has_fenced_leaves_no_two_owners(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "unfenced", partitions=1)
    river.flow()
    run = new_run(river)
    with replaced(run) as owned:
        engine, topic = owned.owner.engine, river.topic("tracking")
        tracking = run.settings.inputs_by_name["tracking"]
        bronze = BronzeTable(owned.owner, run.settings, tracking)
        ranges = Cluster(run.settings.kafka).bounds(topic, 1)
        with engine.taken(kafka_input(run.settings, tracking), ranges, bronze.summary) as batch:
            # And it is gone.
            taking = Lease(
                engine.lake, engine.reader, engine.append, LAYERS, change=FORGET, renews=False
            )
            taking.take()
            river.finish()
            before = offsets_of(river, "tracking")
            with pytest.raises(LeaseLostError):
                bronze.append(batch.rows, BatchCounts(batch.groups))
    assert set(before.values()) == {1}
    assert offsets_of(river, "tracking") == before
    assert river.losses() == Losses()


def tokens(river: River) -> dict[tuple[str, str], int]:
    """By table and application the token of the largest transaction version that the table has
    seen."""
    found = {}
    for log in (river.folder / "lake").glob("*/_delta_log"):
        table = DeltaTable(str(log.parent))
        lines = [
            json.loads(line)
            for file in log.glob("*.json")
            for line in file.read_text().splitlines()
        ]
        for application in {line["txn"]["appId"] for line in lines if "txn" in line}:
            found[log.parent.name, application] = (
                table.transaction_version(application) or 0
            ) >> 32
    return found


@pytest.mark.promise("O11")
@pytest.mark.fault("owners")
@pytest.mark.long
def test_every_start_fences_whatever_was_ever_written_under_a_token(
    kafka: str, tmp_path: Path
) -> None:
    topics: dict[str, Any] = {
        f"publish__{table}_topic": f"fences-{table}" for table in ("late", "quarantine")
    }
    river = River.make(
        kafka,
        tmp_path,
        "fences",
        keep=KEEP,
        kafka__start={"timestamp": "1971-01-01T00:00:00Z"},
        **topics,
    )
    for _ in range(4):
        river.flow()
        river.finish()
    with new_run(river).take_layers() as owned:
        maintain(
            owned.owner.engine,
            [name for layer in LAYERS for name in kept_by(layer, river.settings)],
            owned.expire,
        )
    forgotten(river.settings, "a", Reporter())
    river.config["merge"]["timeout"] = "200ms"
    river.write()
    evolve(river.reader, river.settings, Reporter())
    by_token = {place for place, token in tokens(river).items() if token}

    with new_run(river).take_layers() as owned:
        after = tokens(river)
    assert {name for name, _ in by_token} == {
        *map(tables.bronze, SOURCES),
        *(tables.SILVER, tables.BASES, tables.ERASED, tables.PUBLISHED),
    }
    assert {place: after[place] for place in by_token} == dict.fromkeys(by_token, owned.owner.token)


@pytest.mark.promise("O12")
@pytest.mark.fault("owners")
@pytest.mark.long
def test_maintenance_that_was_replaced_deletes_nothing_and_says_so(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "replaced-maintenance", keep=KEEP)
    for _ in range(4):
        river.flow()
        river.finish()
    every = [*map(tables.bronze, SOURCES), tables.SILVER]
    before = rows_in(river, *every)
    with replaced(new_run(river)) as owned:  # nor does it end well where it has nothing to write
        with Run(river.settings, LAYERS, Reporter(), change=FORGET).take_layers():
            pass
        for table in every:
            with pytest.raises(LeaseLostError):
                owned.expire(table)
    assert rows_in(river, *every) == before
    with new_run(river).take_layers() as owned:
        for table in every:
            owned.expire(table)
    after = rows_in(river, *every)
    shrunk = [name for name in every if after[name] < before[name]]
    assert shrunk == every, f"it would have deleted some of each: {before} {after}"


@pytest.mark.long
@pytest.mark.promise("O12")
@pytest.mark.fault("owners", "rules")
@pytest.mark.usefixtures("every_owner_counts_as_dead")
def test_an_evolve_that_was_replaced_while_it_stood_still_begins_no_epoch(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    river = River.make(kafka, tmp_path, "replaced-evolve")
    river.flow()
    river.finish()
    before = river.settings
    river.config["merge"]["timeout"] = "200ms"
    river.write()

    def replace(_: str) -> None:
        """Another run takes the layers while it stands here."""
        Run(before, ["gold"], Reporter()).once()

    with monkeypatch.context() as patch:
        patch.setattr(evolving, "fault_point", replace)
        with pytest.raises(LeaseLostError):
            evolve(river.reader, river.settings, Reporter())
    assert river.reader.select(tables.EPOCHS, ["epoch"])["epoch"].to_pylist() == [0]
    assert evolve(river.reader, river.settings, Reporter())["applied"]
    assert sorted(river.reader.select(tables.EPOCHS, ["epoch"])["epoch"].to_pylist()) == [0, 1]


@pytest.mark.long
@pytest.mark.promise("O9")
@pytest.mark.fault("clock")
def test_the_last_sink_is_known_although_the_clock_was_set_back(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "clock-set-back")
    layout = new_run(river).engine.lake.layout[tables.PUBLISHED]
    ahead_ms = 4_000_000_000_000  # where the clock stood when the sink before was written to
    row = {
        "partition": 0,
        "first_seq": 0,
        "last_seq": 0,
        "last_event_time": 0,
        "last_key": "a",
        "last_due": 100,
        "last_closed_at": 101,
        "last_tenant": "",
        "sink_offset": 0,
    }
    rows = layout.rows_of([{**row, "committed_at": ahead_ms, "topic": "the-sink-before"}])
    write_deltalake(river.reader.path(tables.PUBLISHED), rows, mode="append")
    for _ in range(2):
        river.flow()
        river.finish()
    noted = river.reader.select(
        tables.PUBLISHED, ["topic", "topic_id", "partition", "last_seq", "committed_at"]
    ).to_pylist()
    now = next(sink for sink in map(sink_of, noted) if sink.startswith(river.sink))
    assert last_sink(river.reader, MERGED) == now
    for p in range(2):
        mine = [row for row in noted if (sink_of(row), row["partition"]) == (now, p)]
        times = [row["committed_at"] for row in sorted(mine, key=lambda row: row["last_seq"])]
        assert times == sorted(set(times))
        assert len(times) > 1


@pytest.mark.long
@pytest.mark.promise("O14")
@pytest.mark.fault("owners", "rules")
def test_a_run_that_was_made_before_the_rules_changed_does_not_begin(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "rules-changed-meanwhile")
    river.flow()
    run = new_run(river)
    run.once()
    river.config["merge"]["timeout"] = "200ms"
    river.write()
    evolve(river.reader, river.settings, Reporter())
    with (
        pytest.raises(ConfigurationError, match="the lake has other rules than this configuration"),
        run.take_layers(),
    ):
        pass
