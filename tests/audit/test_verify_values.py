"""`verify` and values: of a schema, of the user's expressions, near the largest size; and a rebuild
beside its lake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.audit.inputs import case_of, richest_cases, with_topics
from tests.audit.test_verify import name_of_sink, problems_of
from tests.core.test_values import GAINED, MISFITS
from tests.support.cases import heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.effort import draws
from tests.support.journals import decided
from tests.support.lakes import CaseLake
from tests.support.model_lakes import ModelLake, Row, rewrite
from watersmeet.audit.comparison import packed
from watersmeet.audit.rebuild import (
    BASE_FIELD,
    OTHER_RULES,
    VERSION_FIELD,
    rebuild,
    rebuilt_settings,
    verify_against,
)
from watersmeet.audit.verify import verify
from watersmeet.audit.verify_values import as_kept
from watersmeet.core.message import message_bytes
from watersmeet.core.values import typed_values
from watersmeet.core.window import Window
from watersmeet.engine.choice import open_engine
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.identity import REBUILD_BATCH, begin_epoch
from watersmeet.lake.journal import REBUILD
from watersmeet.lake.location import Lake

ODD_KEY = 'q"\\\x01\t\x1f/é\U0001f600'
INTEGERS = {"type": "object", "properties": {name: {"type": "integer"} for name in ("ts", "n")}}
SCHEMA = {
    "type": "object",
    "properties": {
        **INTEGERS["properties"],  # type: ignore[dict-item]
        "x": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": INTEGERS,
    },
}
FIELDS = tuple(SCHEMA["properties"])


def size_of(message: Any) -> int:
    return int(message_bytes(len(message.value or b""), len(message.key), 0))


def kept(source: str, value: bytes) -> Any:
    """What silver keeps of a value of `tracking`, which has the schema, and of `orders`, which has
    none."""
    if source == "orders":
        return value.decode()
    document = json.loads(value)
    more = (
        {name: document["more"].get(name) for name in ("ts", "n")} if "more" in document else None
    )
    return {name: document.get(name) for name in FIELDS} | {
        "n": int(document["n"]),
        "x": float(document["x"]),
        "more": more,
    }


def message(row: Row) -> bytes:
    """With numbers written as Java writes them."""
    parts = {
        "tracking": [part["value"] for part in row["tracking"]],
        "orders": [orjson.Fragment(part["value"]) for part in row["orders"]],
    }
    head = {
        "key": row["merge_key"],
        "event_time": row["event_time"],
        "last_event_time": row["last_event_time"],
    }
    return orjson.dumps({**head, **parts}).replace(b"10000000000.0", b"1.0E10")


def published(lake: ModelLake) -> None:
    lake.arrive()
    lake.merge()
    lake.publish(name_of_sink(lake.settings))


def test_values_of_a_schema_are_compared_by_their_content(kafka: str, tmp_path: Path) -> None:
    schema = tmp_path / "tracking.json"
    schema.write_text(json.dumps(SCHEMA))
    tracking = [
        b'{"ts":0,"k":"a","n":1.0,"x":1e10,"tags":["p",null],"extra":true}',
        b'{"ts":10,"k":"a","n":9007199254740993,"x":5,"more":{"n":3}}',
        heartbeat(900),
    ]
    orders = [keyed("a", 20, big=1), b'{"ts":30,"k":"b","big":1e999}', heartbeat(900)]
    lake = ModelLake(
        with_topics(kafka, tmp_path, "typed", sources__tracking__schema=str(schema)),
        {0: case_of(tracking, orders)},
        kept=kept,
        value=message,
    )
    published(lake)
    assert [len(row["tracking"]) for row in lake.rows] == [2, 0]
    assert problems_of(lake.settings) == []
    size, publish = size_of(lake.messages()[0]), lake.settings.publish
    for largest, expected in (
        (size, []),
        (size - 1, ["valid is True (None), and must be False (too_large)"]),
    ):
        smaller = lake.settings.model_copy(
            update={"publish": publish.model_copy(update={"max_bytes": largest})}
        )
        assert [what for _, what in problems_of(smaller)] == expected

    def changed(row: Row) -> Row:
        parts = [
            {**part, "value": {**part["value"], "n": 9007199254740992}} for part in row["tracking"]
        ]
        return {**row, "tracking": [*row["tracking"][:1], *parts[1:]]}

    rewrite(lake.settings, tables.MERGED, changed)
    (in_silver, sentence), in_sink = problems_of(lake.settings, full=False)
    assert in_silver == "silver: partition 0, key 'a', event_time 0"
    assert "9007199254740992" in sentence.split("merge model")[0]
    assert "9007199254740993" in sentence.split("merge model")[1]
    assert in_sink == (
        "typed[0]@0: seq 0, '0/0/a'",
        "value differs from the row of silver",
    )


def test_a_value_is_read_exactly_as_its_column_keeps_it() -> None:
    kind = pa.struct([("i", pa.int64()), ("d", pa.float64()), ("s", pa.list_(pa.string()))])
    spellings = [b'{"i":1.0,"d":1}', b'{"i":1e0,"d":1.0,"s":null}', b'{"d":1,"i":1,"other":[{}]}']
    assert {as_kept(value, kind, kind) for value in spellings} == {b'{"i":1,"d":1.0,"s":null}'}
    of_map = pa.struct([("m", pa.map_(pa.string(), pa.int64()))])
    assert as_kept(b'{"m":{"b":1.0,"a":null}}', of_map, of_map) == b'{"m":[["b",1],["a",null]]}'
    near = [b'{"i":9007199254740993.0}', b'{"i":9007199254740992.0}', b'{"i":9007199254740993}']
    exact, other, same = (as_kept(value, kind, kind) for value in near)
    assert exact == same != other


@pytest.mark.parametrize("text", MISFITS)
def test_what_does_not_fit_a_field_that_a_schema_gained_is_null(text: str) -> None:
    nothing = dict.fromkeys(GAINED.names)
    assert as_kept(text.encode(), GAINED, GAINED) == packed(nothing)


SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from(["", "ab", 2.0, -0.0, 2.5, 1e300, 2**63, -(2**63) - 1])
    | st.integers(-(2**53), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)


@draws(100)
@given(
    documents=st.lists(
        st.dictionaries(st.sampled_from(GAINED.names), ANYTHING, max_size=7), min_size=1, max_size=4
    )
)
@example([{"count": 2.5, "share": True}])
def test_verify_keeps_of_any_value_what_silver_keeps_however_it_is_cut(
    documents: list[dict[str, Any]],
) -> None:
    texts = [json.dumps(document).encode() for document in documents]
    expected = [as_kept(text, GAINED, GAINED) for text in texts]
    apart = pa.chunked_array([pa.array([text]) for text in texts])
    for values in (pa.array(texts), apart):
        assert list(map(packed, typed_values(values, GAINED).to_pylist())) == expected


def test_an_integer_beyond_a_doubles_fraction_is_rounded_alike() -> None:
    text = b'{"count":9007199254740992.5}'
    [row] = typed_values(pa.array([text]), GAINED).to_pylist()
    assert as_kept(text, GAINED, GAINED) == packed(row)


def test_the_users_own_expressions_are_checked(kafka: str, tmp_path: Path) -> None:
    case = case_of(
        [keyed("a", 0), keyed("b", 10), keyed("c", 20), heartbeat(900)],
        [keyed("a", 5), keyed("c", 25), heartbeat(900)],
    )
    settings = with_topics(
        kafka,
        tmp_path,
        "expressions",
        publish__valid="size(orders) > 0",
        publish__value="merge_key",
    )
    lake = ModelLake(
        settings,
        {0: case},
        is_valid=lambda row: bool(row["orders"]),
        value=lambda row: row["merge_key"].encode(),
    )
    published(lake)
    assert verify(lake.reader, settings) == {"ok": True, "problems": []}
    assert verify(lake.reader, settings, full=True) == {"ok": True, "problems": []}

    def wrong(row: Row) -> Row:
        verdicts = {"b": (True, None), "c": (False, "predicate")}
        valid, reason = verdicts.get(row["merge_key"], (row["valid"], row["invalid_reason"]))
        return {**row, "valid": valid, "invalid_reason": reason}

    rewrite(settings, tables.MERGED, wrong)
    in_sink = [
        (
            "expressions[0]: '0/10/b'",
            "a row of silver is missing in the sink, which has later ones",
        ),
        (
            "expressions[0]@1: seq 1, '0/20/c'",
            "no row of silver has this message: closed_at 121, due 120, merge_key 'c'",
        ),
    ]
    verdicts = [
        (
            "silver: partition 0, key 'b', event_time 10",
            "valid is True (None), and must be False (predicate)",
        ),
        (
            "silver: partition 0, key 'c', event_time 20",
            "valid is False (predicate), and must be True (None)",
        ),
    ]
    assert problems_of(settings) == [*in_sink, *verdicts]


def test_odd_keys_and_the_largest_size_are_exact(kafka: str, tmp_path: Path) -> None:
    case = case_of(
        [keyed(ODD_KEY, 0), keyed("b", 10, pad="x" * 300), heartbeat(900)], [heartbeat(900)]
    )
    lake = ModelLake(with_topics(kafka, tmp_path, "odd"), {0: case})

    def escaped(row: Row) -> bytes:
        key = orjson.dumps(row["merge_key"]).replace(b"\\u001f", b"\\u001F")
        return lake.default_value(row).replace(orjson.dumps(row["merge_key"]), key, 1)

    lake.value = escaped
    published(lake)
    assert problems_of(lake.settings) == []
    size = size_of(lake.messages()[1])
    publish = lake.settings.publish
    for largest, expected in (
        (size, []),
        (size - 1, ["valid is True (None), and must be False (too_large)"]),
    ):
        smaller = lake.settings.model_copy(
            update={"publish": publish.model_copy(update={"max_bytes": largest})}
        )
        assert [what for _, what in problems_of(smaller)] == expected


# -- verify --against


def copies(tmp_path: Path) -> tuple[ModelLake, ModelLake]:
    """A lake, and one that holds what its rebuild would."""
    cases = dict(enumerate(richest_cases(4)))
    here, there = (ModelLake(settings_for(tmp_path / name), cases) for name in ("here", "there"))
    for share in (0.5, 1.0):
        here.arrive(share)
        here.merge()
    there.arrive()
    there.merge()
    version = str(here.reader.version(tables.SILVER))
    facts = {REBUILD_BATCH: "1", BASE_FIELD: "-1", VERSION_FIELD: version}
    decided(there.lake, REBUILD, {"facts": facts})
    return here, there


@pytest.mark.parametrize("piece_bytes", [4_000, 2**25])
def test_a_rebuild_is_compared_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr("watersmeet.lake.pieces.PIECE_BYTES", piece_bytes)
    here, there = copies(tmp_path)
    directory = Path(str(there.settings.lake))
    assert verify_against(here.reader, there.reader, here.settings, directory) == {
        "ok": True,
        "problems": [],
    }
    first, second, third, *_ = sorted(
        here.rows, key=lambda row: (row["event_time"], row["partition"], row["merge_key"])
    )
    names = ("partition", "merge_key", "event_time")

    def changed(row: Row) -> Row | None:
        which = [[each[name] for name in names] for each in (first, second, third)]
        if [row[name] for name in names] == which[0]:
            return None
        if [row[name] for name in names] == which[1]:
            return {**row, "last_event_time": row["last_event_time"] + 1}
        return {**row, "merge_key": "another"} if [row[name] for name in names] == which[2] else row

    rewrite(there.settings, tables.MERGED, changed)
    rewrite(there.settings, tables.LATE, lambda row: {**row, "position": row["position"] + 1})
    found = verify_against(here.reader, there.reader, here.settings, directory)["problems"]
    in_silver = [problem for problem in found if problem["where"].startswith("silver: ")]
    assert sorted(problem["what"] for problem in in_silver) == [
        "only the rebuild has it",
        "the rebuild does not have it",
        "the rebuild does not have it",
        "the rebuild has a different last_event_time",
    ]
    assert {problem["what"] for problem in found if problem["where"].startswith("late: ")} == {
        "the rebuild has a different position"
    }


def test_a_rebuild_is_compared_by_the_rules_of_the_batches_that_it_repeats(tmp_path: Path) -> None:
    """Also one from before a change of rules, and from before the first batch by new ones."""
    settings = settings_for(tmp_path)
    lake = CaseLake(open_engine(settings), settings, dict(enumerate(richest_cases(2))))
    begin_epoch(lake.reader, lake.engine.append, settings, 0)
    lake.arrive(0.5)
    lake.merge()
    made = [tmp_path / name for name in ("before", "between", "after", "other")]
    rebuild(lake.reader, settings, made[0])
    shorter = lake.settings = settings_for(tmp_path, merge__timeout="30ms")
    begin_epoch(lake.reader, lake.engine.append, shorter, 1)
    rebuild(lake.reader, shorter, made[1])
    lake.arrive()
    lake.merge()
    rebuild(lake.reader, shorter, made[2])
    rebuild(lake.reader, shorter, made[3], Window(30))
    *faithful, (other, there) = [
        (directory, DeltaRsReader(Lake(rebuilt_settings(settings, directory))))
        for directory in made
    ]
    for directory, reader in faithful:
        assert verify_against(lake.reader, reader, shorter, directory)["problems"] == [], directory
    with pytest.raises(ConfigurationError, match=r"derived with a timeout of 30 ms"):
        verify_against(lake.reader, there, shorter, other)


def test_the_rebuild_of_a_lake_that_had_another_timeout_is_refused(tmp_path: Path) -> None:
    cases = dict(enumerate(richest_cases(2)))
    lakes = []
    for name, timeout in ("former", "30ms"), ("again", "100ms"):
        settings = settings_for(tmp_path / name, merge__timeout=timeout)
        lake = CaseLake(open_engine(settings), settings, cases)
        begin_epoch(lake.reader, lake.engine.append, settings, 0)
        lake.arrive()
        lake.merge()
        lakes.append(lake)
    former, again = lakes
    directory = tmp_path / "made"
    rebuild(former.reader, former.settings, directory)
    there = DeltaRsReader(Lake(rebuilt_settings(again.settings, directory)))
    with pytest.raises(ConfigurationError, match=r"derived with a timeout of 30 ms"):
        verify_against(again.reader, there, again.settings, directory)


def test_the_lake_is_compared_as_it_was_when_the_rebuild_was_made(tmp_path: Path) -> None:
    here, there = copies(tmp_path)
    here.jump(-3)
    here.merge()
    directory = Path(str(there.settings.lake))
    silver = [
        p
        for p in verify_against(here.reader, there.reader, here.settings, directory)["problems"]
        if "silver" in p["where"]
    ]
    assert silver == []


def test_without_a_complete_rebuild_of_the_same_timeout_nothing_is_compared(tmp_path: Path) -> None:
    here, there = copies(tmp_path)
    directory = Path(str(there.settings.lake))
    decided(there.lake, REBUILD, {"facts": {OTHER_RULES: "timeout of 200 ms"}})
    with pytest.raises(
        ConfigurationError, match="a timeout of 200 ms, which makes other merge records"
    ):
        verify_against(here.reader, there.reader, here.settings, directory)
    rewrite(there.settings, tables.JOURNAL, lambda row: None if row["kind"] == REBUILD else row)
    with pytest.raises(ConfigurationError, match="holds no complete rebuild"):
        verify_against(here.reader, there.reader, here.settings, directory)
