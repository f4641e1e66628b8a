"""Records as whoever may write to a topic may make them, with what must become of each.

Of `tracking` values are JSON, of `orders` Avro with a registry. Event times are those of a stretch
of a second.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import orjson
import pyarrow as pa

from tests.core.test_avro_writers import EMPTY, chain, doubling, dropping, nested
from tests.support.avro import encoded, framed
from tests.support.cases import BAD_VALUES, HOLE, SOURCES, heartbeat, keyed, spelled
from tests.support.hostile_registry import schema
from watersmeet.core.avro_schema import UNKNOWN, AvroSchema
from watersmeet.core.columns import times_ms
from watersmeet.core.reading import KAFKA, ReadingRules, Reason, read_records
from watersmeet.core.times import LAST_EVENT_TIME_MS

MIB: Final = 2**20

READER: Final[dict[str, Any]] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "ts", "type": "long"},
        {"name": "k", "type": ["null", "string"], "default": None},
        {"name": "type", "type": ["null", "string"], "default": None},
        {"name": "n", "type": ["null", "long"], "default": None},
        {
            "name": "items",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Item",
                    "fields": [{"name": "n", "type": "int"}],
                },
            },
            "default": [],
        },
    ],
}
DROPPED: Final = {"name": "dropped", "type": {"type": "array", "items": "string"}}
WRITERS: Final = (READER, {**READER, "fields": [*READER["fields"], DROPPED]})
"""What orders are written with: the reader's schema, and one with a last field that it lacks."""

KEYS: Final = (
    *(
        "a",
        "é",
        "\U0001f600",
        "${env:HOME}",
        "${spark.app.name}",
        "'; DROP TABLE silver; --",
        "`a`",
        '"',
        "\\",
        "%s{}",
        "a/b",
        " ",
    ),
    *(
        "\x1b[2J\x1b[31m",
        "\x9b31m",
        "\u202eabc",
        "a\nb\r\n",
        "\x00",
        "null",
        "__HIVE_DEFAULT_PARTITION__",
        "k" * 2000,
    ),
)
"""All of them are good."""

REDRIVEN: Final = "watersmeet.redriven"
LIES: Final = (b"9" * 5000, "²".encode(), b"", b"-1", b"\xff", b"99999999999999999999", b"0")
"""Offsets that a record may say it was redriven from."""

TIMES: Final = (5_000, LAST_EVENT_TIME_MS + 1, 1_768_780_800_123_456, 2**63 - 1)
"""Timestamps of Kafka's that vouch for the event times of good records."""

NEGATIVE: Final = (-1, -5_000, -(2**63))
"""Those that vouch for none."""

HEADERS_BYTES: Final = MIB // 4
"""What thousands of headers of a record have together."""

NOT_UTF_8: Final = [(b"first", b"1"), (b"\xff\xfe", b"2")]

FIRST_HOSTILE_ID, UNKNOWN_IDS = 9_000_000, (9_100_000, 9_100_001, 2**32 - 1)
_HOSTILE: Final[tuple[tuple[bytes, bytes], ...]] = (
    (schema(doubling(40, "int")), b"\x02"),
    (schema(doubling(40, "null")), b"\x02"),
    (schema(dropping({"type": "array", "items": EMPTY})), b"\x02\x02\x00"),
    (schema(chain(400)), b"\x02"),
    (json.dumps({"id": 1, "schema": nested(2000)}).encode(), b"\x02\x00"),
    (schema({**READER, "doc": "x" * MIB}), b"\x02"),
    (schema(dropping("endless0"), "endless0"), b"\x02\x02"),
    (
        json.dumps({"id": 1, "schema": 'syntax = "proto3";', "schemaType": "PROTOBUF"}).encode(),
        b"\x02",
    ),
)
"""What a registry may answer, and a value that was written with it."""

_LARGE: Final = json.dumps([{"name": f"a{n}", "type": "int"} for n in range(30_000)])[1:-1]
_LARGE_IDS: Final = range(9_200_000, 9_300_000)


class _Answers(dict[int, bytes]):
    """Beside some answers, as many large schemas as there are ids, no two of which are the same."""

    def __contains__(self, schema_id: object) -> bool:
        return super().__contains__(schema_id) or schema_id in _LARGE_IDS

    def __missing__(self, schema_id: int) -> bytes:
        fields = f'[{{"name": "b{schema_id}", "type": "int"}}, {_LARGE}]'
        text = f'{{"type": "record", "name": "Order", "fields": {fields}}}'
        return json.dumps({"id": schema_id, "schema": text}).encode()


HOSTILE_SCHEMAS: Final = _Answers(
    {FIRST_HOSTILE_ID + n: answer for n, (answer, _) in enumerate(_HOSTILE)}
)
_HOSTILE_TEXTS: Final = {
    schema_id: json.loads(answer)["schema"] for schema_id, answer in HOSTILE_SCHEMAS.items()
}


@dataclass(frozen=True)
class Hostile:
    """A record as it is sent, and what must become of it: it is refused for a `reason`, or what the
    model is `told` of it counts.

    `timestamp`: None for the time of its sending; `headers` by name, in UTF-8 or not.
    """

    value: bytes | None
    told: bytes = HOLE
    reason: str | None = None
    key: bytes | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    timestamp: int | None = None
    codec: str = "none"

    @property
    def is_raw(self) -> bool:
        """Whether only the C library sends it."""
        return self.timestamp is not None or self.headers == tuple(NOT_UTF_8)


def refused(reason: Reason, value: bytes | None, **more: Any) -> Hostile:
    """A record that must be refused."""
    return Hostile(value, reason=reason.value, **more)


Make: TypeAlias = "Callable[[Producers, str, int], Hostile]"
"""Makes a record of a source and of the stretch of event time that begins at a time (ms)."""

BAD: Final[dict[str, list[Make]]] = {source: [] for source in SOURCES}
"""By source, what comes beside good records all the time."""

HEAVY: Final[list[tuple[str, Make]]] = []
"""Beside a source, what is large, or takes much work: each of them comes at the start, and one of
them now and then."""


def bad_record(*sources: str, often: int = 1) -> Callable[[Make], Make]:
    """A method of `Producers` that makes bad records of these sources; `often` as the others."""

    def add(make: Make) -> Make:
        for source in sources:
            BAD[source] += [make] * often
        return make

    return add


def heavy_record(*sources: str) -> Callable[[Make], Make]:
    """A method of `Producers` that makes a heavy record of these sources."""

    def add(make: Make) -> Make:
        HEAVY.extend((source, make) for source in sources)
        return make

    return add


class Producers:
    """Makes the records of both sources. `ids`: of the schemas in `WRITERS`, as the registry has
    them."""

    def __init__(
        self,
        rng: random.Random,
        ids: Mapping[int, dict[str, Any]],
        rules: Mapping[str, ReadingRules],
        topics: Mapping[str, str],
    ) -> None:
        """`rules` and `topics`: by source, how the run reads it, and what a record that lies of
        itself names."""
        self._rng, self._ids, self._topics = rng, ids, topics
        [self._most_bytes] = {of.max_record_bytes for of in rules.values()}
        texts = {schema_id: json.dumps(of) for schema_id, of in ids.items()} | _HOSTILE_TEXTS
        self._rules = {source: _with_writers(of, _Texts(texts)) for source, of in rules.items()}

    def good(self, source: str, time_ms: int) -> Hostile:
        """A record that must be merged, or is late: with keys, headers and Kafka keys of any
        kind."""
        rng = self._rng
        key, n = rng.choice(KEYS), rng.randrange(10**6)
        value = keyed(key, time_ms, n=n) if source == "tracking" else _order(ts=time_ms, k=key, n=n)
        headers = rng.choice(
            [(), (), (), tuple(NOT_UTF_8), self._lie(), ((b"watersmeet.seq", b"9" * 5000),)]
        )
        if headers and headers != tuple(NOT_UTF_8) and rng.random() < 0.1:
            headers *= HEADERS_BYTES // sum(len(name + value) for name, value in headers)
        kafka_key = rng.choice([None, b"", b"\xff\x00", b"${env:HOME}", b"k" * 100])
        return Hostile(
            self._written(source, value),
            value,
            None,
            kafka_key,
            headers,
            codec=rng.choice(["none", "gzip", "zstd"]),
        )

    def beat(self, source: str, time_ms: int) -> Hostile:
        """A heartbeat."""
        value = heartbeat(time_ms) if source == "tracking" else _order(ts=time_ms, type="heartbeat")
        return Hostile(self._written(source, value), value)

    def bad(self, source: str, begin: int) -> Hostile:
        """A record that must be refused for a known reason, or a good one that was changed
        somewhere."""
        return self._rng.choice(BAD[source])(self, source, begin)

    def _written(self, source: str, value: bytes, *, with_schema: int | None = None) -> bytes:
        """A value of the model as it is sent."""
        if source == "tracking":
            return value
        schema_id = with_schema or self._rng.choice([*self._ids])
        return framed(
            schema_id, encoded(self._ids[schema_id], {"dropped": ["x"], **orjson.loads(value)})
        )

    def copy(self, source: str, time_ms: int, partition: int, offset: int) -> Hostile:
        """A good record, which says that it was redriven from an offset."""
        place = f"{self._topics[source]}/{partition}/{offset}".encode()
        return replace(self.good(source, time_ms), headers=((REDRIVEN.encode(), place),))

    def _lie(self) -> tuple[tuple[bytes, bytes], ...]:
        place = f"{self._topics['tracking']}/0/".encode()
        return ((REDRIVEN.encode(), place + self._rng.choice(LIES)),)

    # -- heavy records

    @heavy_record(*SOURCES)
    def _more_than_the_client_takes(self, _: str, __: int) -> Hostile:
        """A message of a few kilobytes that unpacks to so much."""
        codec, size = self._rng.choice([("zstd", 150), ("gzip", 70)])
        return refused(Reason.TOO_LARGE, bytes(size * MIB), codec=codec)

    @heavy_record(*SOURCES)
    def _too_large(self, _: str, __: int) -> Hostile:
        return refused(Reason.TOO_LARGE, bytes(self._most_bytes + 1), codec="gzip")

    @heavy_record("orders")
    def _zeros(self, _: str, begin: int) -> Hostile:
        """Megabytes of zeros, each of which is a record with a field."""
        return refused(
            Reason.UNDECODABLE, self._of_zeros(begin, self._most_bytes - 100), codec="gzip"
        )

    @heavy_record("orders")
    def _most_items(self, _: str, begin: int) -> Hostile:
        """A good value of as many records as may well be in one."""
        count = 200_000
        told = _order(ts=begin, k="a", items=[{"n": 0}] * count)
        return Hostile(self._of_zeros(begin, count), told, codec="zstd")

    def _of_zeros(self, begin: int, count: int) -> bytes:
        empty = encoded(READER, orjson.loads(_order(ts=begin, k="a")))
        length = encoded({"type": "long"}, count)
        return framed(min(self._ids), empty[:-1] + length + bytes(count) + b"\0")

    @heavy_record("tracking")
    def _many_objects(self, _: str, begin: int) -> Hostile:
        head, item, end = self._rng.choice(
            [(b"[", b"{},", b"0]"), (b"[", b"0,", b"0]"), (b"{", b'"":[],', b'"a":0}')]
        )
        of_items = head + item * (self._most_bytes // len(item) - 20) + end
        value = b'{"ts":%d,"k":"a","x":%s}' % (begin, of_items)
        return refused(Reason.UNDECODABLE, value, codec="zstd")

    @heavy_record("tracking")
    def _many_names(self, _: str, begin: int) -> Hostile:
        """A good value of as many names, and a text of what begins items elsewhere."""
        names = b",".join(b'"%d":0' % n for n in range(100_000))
        value = b'{"ts":%d,"k":"a","x":{%s},"t":"%s"}' % (begin, names, b'\\"{},:[' * 100_000)
        return Hostile(value, value, codec="zstd")

    @heavy_record("tracking")
    def _long_text(self, _: str, begin: int) -> Hostile:
        """A good value with a text of megabytes."""
        value = keyed(f"long{begin}", begin, text="x" * (3 * MIB))
        return Hostile(value, value, codec="zstd")

    @heavy_record("tracking")
    def _endless_json(self, _: str, __: int) -> Hostile:
        return refused(Reason.UNDECODABLE, b"{" * (self._most_bytes - 1), codec="zstd")

    @heavy_record("orders")
    def _many_items(self, _: str, begin: int) -> Hostile:
        """Each is one byte, which spells an empty text in the field that the reader skips."""
        none = framed(
            max(self._ids),
            encoded(WRITERS[1], {"dropped": [], **orjson.loads(_order(ts=begin, k="a"))}),
        )
        more = self._most_bytes - len(none) - 10
        items = encoded("long", more) + bytes(more)
        return refused(Reason.UNDECODABLE, none[:-1] + items + b"\x00", codec="zstd")

    # -- records that are refused

    @bad_record(*SOURCES)
    def _timeless(self, source: str, begin: int) -> Hostile:
        return replace(
            self.good(source, begin),
            told=HOLE,
            reason=Reason.EVENT_TIME_IN_FUTURE.value,
            headers=(),
            timestamp=self._rng.choice(NEGATIVE),
        )

    @bad_record(*SOURCES)
    def _of_any_year(self, source: str, begin: int) -> Hostile:
        """A good record, whose timestamp of Kafka's is in another unit, or none that a calendar
        has."""
        return replace(self.good(source, begin), timestamp=self._rng.choice(TIMES))

    @bad_record(*SOURCES)
    def _of_the_future(self, source: str, _: int) -> Hostile:
        time_ms = self._rng.choice([LAST_EVENT_TIME_MS, LAST_EVENT_TIME_MS + 1, 2**62])
        reason = (
            Reason.EVENT_TIME_IN_FUTURE if time_ms == LAST_EVENT_TIME_MS else Reason.NO_EVENT_TIME
        )
        return replace(self.good(source, time_ms), told=HOLE, reason=reason.value)

    @bad_record("tracking")
    def _bad_json(self, source: str, _: int) -> Hostile:
        return self._as_read(source, self._rng.choice(BAD_VALUES))

    @bad_record("tracking")
    def _nested(self, _: str, begin: int) -> Hostile:
        deep = self._rng.choice([b"[", b'{"a":']) * 100_000
        return refused(Reason.UNDECODABLE, b'{"ts":%d,"k":"a","x":' % begin + deep, codec="gzip")

    @bad_record("orders")
    def _of_hostile_schema(self, _: str, __: int) -> Hostile:
        n = self._rng.randrange(len(_HOSTILE))
        return refused(Reason.UNDECODABLE, framed(FIRST_HOSTILE_ID + n, _HOSTILE[n][1]))

    @bad_record("orders")
    def _of_one_of_many_schemas(self, _: str, __: int) -> Hostile:
        """Too short, whether there is still room for its schema or not."""
        return refused(Reason.UNDECODABLE, framed(self._rng.choice(_LARGE_IDS), b"\x02"))

    @bad_record("orders")
    def _unknown(self, source: str, begin: int) -> Hostile:
        of = self.good(source, begin)
        return replace(
            of,
            value=framed(self._rng.choice(UNKNOWN_IDS), (of.value or b"")[5:]),
            told=HOLE,
            reason="undecodable",
        )

    @bad_record("orders")
    def _cut_short(self, source: str, begin: int) -> Hostile:
        """In the field that the reader skips."""
        value = self._written(source, _order(ts=begin, k="a", n=1), with_schema=max(self._ids))
        return refused(Reason.UNDECODABLE, value[: -self._rng.randint(1, 3)])

    # -- random changes

    @bad_record(*SOURCES, often=2)
    def _mutated(self, source: str, begin: int) -> Hostile:
        """A good record, changed at random. Where it can be read still, what it says is of the same
        stretch of time."""
        while True:
            good = self.good(source, begin + self._rng.randrange(1000))
            framing = 0 if source == "tracking" else 5
            assert good.value is not None
            found = self._as_read(
                source, good.value[:framing] + self._changed(good.value[framing:])
            )
            if found.reason is not None:
                return replace(found, key=good.key, headers=good.headers, codec=good.codec)
            if (told := model_value(found.told)) is not None and begin - 1000 <= told[
                0
            ] <= begin + 1000:
                return replace(found, key=good.key, headers=good.headers, codec=good.codec)

    def _changed(self, value: bytes) -> bytes:
        rng, changed = self._rng, bytearray(value)
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            at, until = sorted(rng.randrange(len(changed) + 1) for _ in range(2))
            until = min(until, at + 8)
            match rng.randrange(5):
                case 0 if at < len(changed):
                    changed[at] ^= 1 << rng.randrange(8)
                case 1:
                    del changed[at:until]
                case 2:
                    changed[at:at] = rng.randbytes(rng.randint(1, 4))
                case 3:
                    changed[at:at] = changed[at:until]
                case _:
                    changed[at:until] = rng.choice(
                        [b"", b"null", b"1e999", b"-0", b"\x00", b'"', b"\\u0000", b"\xed\xa0\x80"]
                    )
        return bytes(changed)

    def _as_read(self, source: str, value: bytes | None) -> Hostile:
        """A value with what the pure function of reading says of it."""
        now_us = time.time_ns() // 1000
        row = {
            "topic": "t",
            "partition": 0,
            "offset": 0,
            "kafka_timestamp": now_us,
            "timestamp_type": 0,
            "value": value,
        }
        rules = self._rules[source]
        found = read_records(pa.Table.from_pylist([row], KAFKA), rules)
        [key], [reason] = found["merge_key"].to_pylist(), found["reason"].to_pylist()
        if reason is not None:
            return Hostile(value, reason=reason)
        told = (
            _order(**rules.schema.decoder()(value))
            if isinstance(rules.schema, AvroSchema)
            else value or HOLE
        )
        is_alike = model_value(told) == (int(times_ms(found["event_time"])[0]), key)
        return Hostile(value, told if is_alike else HOLE)


def _order(**fields: Any) -> bytes:
    """An order as its message has it: all fields of `READER`, in their order."""
    return spelled(
        orjson.dumps(
            {
                field["name"]: fields.get(field["name"], field.get("default"))
                for field in READER["fields"]
            }
        )
    )


def model_value(value: bytes) -> tuple[int, Any] | None:
    """Event time and key, where the model would find them as reading has: it knows numbers and
    texts alone."""
    try:
        document = orjson.loads(value)
        time_ms, key, is_beat = (
            document["ts"],
            document.get("k"),
            document.get("type") == "heartbeat",
        )
    except (ValueError, KeyError, TypeError):
        return None
    is_plain = (
        type(time_ms) is int
        and (key is None if is_beat else isinstance(key, str) and key != "")
        and "g" not in document
    )
    return (time_ms, key) if is_plain else None


class _Texts(dict[int, str]):
    def __missing__(self, schema_id: int) -> str:
        return UNKNOWN


def _with_writers(rules: ReadingRules, texts: Mapping[int, str]) -> ReadingRules:
    return (
        replace(rules, schema=replace(rules.schema, writers=texts))
        if isinstance(rules.schema, AvroSchema)
        else rules
    )
