"""Gold with tenants: one gapless sequence by (closed at, tenant, due, key), whatever is cut off,
whoever writes silver."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
import pytest

from tests.laws.conftest import MakeLake
from tests.support.cases import Case
from tests.support.crashes import CrashError, dying_at
from tests.support.inputs import tp_of
from tests.support.lakes import CaseLake
from tests.support.topics import consume, delete_topic
from watersmeet.core.plan import BatchPlan, OffsetRange
from watersmeet.core.sequence import MERGED
from watersmeet.core.silver import in_silver
from watersmeet.gold import Gold
from watersmeet.lake import tables
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.progress import batch_rows, facts_of
from watersmeet.lake.published import last_tails

PARTITIONS = 2
TENANTS = ("%2F", " ", "100%", "a", "a/b", "é", "\uff61", "\U0001f600")
"""In the order of their UTF-8 bytes; in that of UTF-16 the last one would come before the one
before it."""
KEYS = ("k", "k/1", "\uff61", "\U0001f600")


class Row(NamedTuple):
    """A finished row of silver; times in ms."""

    partition: int
    closed_at: int
    tenant: str
    due: int
    key: str
    event_time: int

    @property
    def place(self) -> tuple[int, bytes, int, bytes]:
        return self.closed_at, self.tenant.encode(), self.due, self.key.encode()

    @property
    def id(self) -> str:
        spelled = {"%2F": "%252F", " ": "%20", "100%": "100%25", "a/b": "a%2Fb"} | {
            text: "".join(f"%{byte:02X}" for byte in text.encode()) for text in TENANTS[-3:]
        }
        return (
            f"{self.partition}/{self.event_time}/{spelled.get(self.tenant, self.tenant)}/{self.key}"
        )


def rows_of(partition: int, rng: random.Random) -> list[Row]:
    """In the order of publication: many that are closed at one time, and event times that say
    nothing about it."""
    every = [
        (at, tenant, due, key)
        for at in (500, 501, 740)
        for tenant in TENANTS
        for due in (480, 499)
        for key in KEYS
    ]
    times = rng.sample(range(400), len(every))
    rows = [
        Row(partition, at, tenant, due, key, time)
        for (at, tenant, due, key), time in zip(every, times, strict=True)
    ]
    return [row for row in sorted(rows, key=lambda row: row.place) if rng.random() < 0.7]


@dataclass
class River:
    """A lake whose silver is written by hand, its sink, and what was seen of it on the way."""

    lake: CaseLake
    rows: list[Row] = field(default_factory=list)
    """What silver has, in the order of publication."""
    seen: dict[str, Any] = field(default_factory=dict)

    def messages(self) -> list[Any]:
        settings = self.lake.settings
        return consume(settings.kafka.bootstrap_servers, settings.publish.topic, PARTITIONS)

    def write(self, rows: Sequence[Row], batch: int, **more: Any) -> None:
        """As a batch of silver, in no order."""
        self.rows = sorted([*self.rows, *rows], key=lambda row: (row.partition, row.place))
        part = {"offset": batch, "event_time": 0, "value": '{"n":1}'}
        written = [
            {
                "partition": row.partition,
                "merge_key": row.key,
                "status": "timed_out",
                "event_time": row.event_time,
            }
            | {
                "last_event_time": row.event_time + 7,
                "tracking": [part],
                "orders": [],
                "valid": True,
                "batch": batch,
                "record_bytes": 7,
            }
            | {"due": row.due, "closed_at": row.closed_at, "tenant": row.tenant, **more}
            for row in random.Random(batch).sample(rows, len(rows))
        ]
        table = self.lake.quick.lake.layout[tables.SILVER]
        self.lake.owner(self.lake.quick).append(
            tables.SILVER, table.rows_of(written), f"test-{batch}", {"batch": batch}
        )

    def check(self) -> None:
        """The sink has what silver has, in order, and says of each message what it is."""
        messages = self.messages()
        assert [said(message) for message in messages] == [
            (row.partition, row.key, row.tenant, str(row.closed_at), str(row.due), row.id)
            for row in self.rows
        ]
        for p in range(PARTITIONS):
            seqs = [int(headers_of(m)["watersmeet.seq"]) for m in messages if m.partition() == p]
            assert seqs == list(range(len(seqs)))
        for message, row in zip(messages, self.rows, strict=True):
            assert message.timestamp()[1] == max(1, row.event_time)
            assert message.value().decode() == (
                f'{{"key":{orjson.dumps(row.key).decode()},"tenant":{orjson.dumps(row.tenant).decode()},'
                f'"event_time":{row.event_time},"last_event_time":{row.event_time + 7},'
                '"tracking":[{"n":1}],"orders":[]}'
            )


def headers_of(message: Any) -> dict[str, str]:
    return {name: content.decode() for name, content in message.headers()}


def said(message: Any) -> tuple[Any, ...]:
    headers = headers_of(message)
    names = ("tenant", "closed_at", "due", "id")
    return (
        message.partition(),
        message.key().decode(),
        *(headers[f"watersmeet.{name}"] for name in names),
    )


@pytest.fixture(scope="module")
def river(new_lake: MakeLake, kafka: str, kind: str) -> River:
    """Published up to the middle of what is closed at one time, then with a crash between
    transaction and note, then the rest."""
    sink, rng = f"laws-gold-tenants-{kind}", random.Random(7)
    merge = {"window": {"gap": "20ms", "max": "100ms"}, "tenant": "g", "tenant_max_lag": "300ms"}
    cases = {p: Case({"tracking": [], "orders": []}, 100) for p in range(PARTITIONS)}
    river = River(new_lake(cases, bootstrap=kafka, publish__topic=sink, name=sink, merge=merge))
    rows = {p: rows_of(p, rng) for p in range(PARTITIONS)}
    river.write([row for mine in rows.values() for row in mine[:50]], 0)
    river.lake.publish()
    river.check()

    river.write([row for mine in rows.values() for row in mine[50:53]], 1)
    with pytest.raises(CrashError):
        river.lake.publish(dying_at(river.lake.engine, "append", tables.PUBLISHED))
    river.seen["unnoted"] = last_tails(river.lake.reader, MERGED)
    river.write([row for mine in rows.values() for row in mine[53:]], 2)
    refused = [row._replace(event_time=900) for row in rows[0][::9]]
    kept, river.rows = river.rows, []
    river.write(refused, 3, valid=False, invalid_reason="predicate")
    river.rows = kept
    river.lake.publish()
    return river


def test_tenants_are_published_in_the_order_of_their_utf_8_bytes_and_every_message_says_whose_it_is(
    river: River,
) -> None:
    assert all(
        len([row for row in river.rows if row.partition == p]) > 100 for p in range(PARTITIONS)
    )
    river.check()


def test_a_sequence_goes_on_in_the_midst_of_what_is_closed_at_one_time(river: River) -> None:
    """Where a failure had left a part of it, and where it was out and not noted."""
    before = [row for row in river.rows if row.partition == 0]
    assert before[49].closed_at == before[50].closed_at
    assert {tail.seq for tail in river.seen["unnoted"].values()} == {49}
    for p, tail in last_tails(river.lake.reader, MERGED).items():
        last = [row for row in river.rows if row.partition == p][-1]
        assert tail.place == last.place
    assert river.lake.publish() == []


def test_only_where_the_lag_has_changed_messages_tell_of_it(river: River, kind: str) -> None:
    lake = river.lake
    said = {headers_of(m).get("watersmeet.rules") for m in river.messages()} - {None}
    assert said == {lake.settings.fingerprint}
    begin_epoch(lake.reader, lake.quick.append, lake.settings, 0)
    changed = lake.settings.model_copy(
        update={"merge": lake.settings.merge.model_copy(update={"tenant_max_lag_ms": 1000})}
    )
    begin_epoch(lake.reader, lake.quick.append, changed, 4)
    at_9000 = OffsetRange(0, 0, None, 9000, 9000)
    ranges = {
        tp_of(source, p): at_9000 for source in lake.settings.sources for p in range(PARTITIONS)
    }
    silver = lake.quick.lake.schema(tables.SILVER)
    for batch in (3, 4):
        clocks = dict.fromkeys(range(PARTITIONS), 9000)
        plan = BatchPlan(batch, ranges, clocks, epoch=int(batch == 4))
        rows = in_silver(batch_rows(plan, batch), "batch", silver)
        lake.owner(lake.quick).append(tables.SILVER, rows, facts=facts_of(plan))
    river.write([Row(0, 5000, "é", 4900, "k", 4800)], 4)
    list(Gold(lake.owner(), changed, PARTITIONS).drain())
    last = [headers_of(m) for m in river.messages() if m.partition() == 0][-1]
    assert last["watersmeet.tenant"] == "é"
    assert last["watersmeet.rules"].split(",") == sorted(
        [lake.settings.fingerprint, changed.fingerprint]
    )


def test_a_sink_that_was_made_again_gets_the_whole_sequence_byte_for_byte(
    river: River, kafka: str
) -> None:
    before = river.lake.messages()
    delete_topic(kafka, river.lake.settings.publish.topic)
    river.lake.publish()
    assert river.lake.messages() == before
