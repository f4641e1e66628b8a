"""Each rule of taking up a lost lake from the sink, by example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256

import pytest

from tests.support.cases import SOURCES, rules_of
from tests.support.inputs import record_of
from tests.support.recoveries import idle_header
from tests.support.sequences import by_key, merged_tail, published
from watersmeet.core.headers import MAX_HEADER_BYTES
from watersmeet.core.idle import IdleDecision
from watersmeet.core.model import LateRecord, PartitionMerge, Record
from watersmeet.core.recovery import (
    CloseTimeRange,
    JumpedError,
    LeftBehind,
    NotToldError,
    Origin,
    SinkState,
    encode_idle,
    encode_min_offsets,
    life_headers,
    min_offset,
    parse_idle,
    parse_rules,
    parsed,
    recovery_headers,
    sink_state,
)
from watersmeet.core.sequence import (
    CORRECTED_IN,
    FROM,
    IDLE,
    IDLE_PACKED,
    JUMPED,
    LIFE,
    MIN_OFFSETS,
    NO_RECOVERY,
    RULES,
    SEQ,
    Tail,
    clock_of,
)
from watersmeet.core.window import Window

T = 100
TIMEOUT = Window(T)


# -- what is already published


def recovering(*records: Record, recovered: Mapping[str, list[int]]) -> PartitionMerge:
    """One partition with a head of 1000 in both sources, after these records."""
    model = PartitionMerge(rules_of(SOURCES, T), recovered=published(recovered, T))
    model.arrive(*records, record_of("tracking", 98, 1000), record_of("orders", 99, 1000))
    model.advance()
    return model


@pytest.mark.parametrize(("position", "is_published"), [(399, True), (400, True), (401, False)])
def test_a_record_is_already_published_up_to_the_timeout_after_a_message_of_its_key(
    position: int, is_published: bool
) -> None:
    record = record_of("tracking", 1, position, "a")
    model = recovering(record, recovered={"a": [300]})
    assert [each for _, each in model.passed] == [record] * is_published
    assert [row.event_time for row in model.timed_out] == [position] * (not is_published)


def test_its_position_says_whether_a_record_is_already_published_not_its_event_time() -> None:
    model = recovering(
        record_of("orders", 1, 401), record_of("orders", 2, 380, "a"), recovered={"a": [300]}
    )
    assert model.passed == []
    assert [row.event_time for row in model.timed_out] == [380]


def test_any_message_of_the_key_counts_and_no_other_key() -> None:
    one, other = record_of("tracking", 1, 400, "a"), record_of("tracking", 2, 400, "b")
    model = recovering(one, other, recovered={"a": [100, 350, 120], "c": [400]})
    assert [each for _, each in model.passed] == [one]
    assert [row.key for row in model.timed_out] == ["b"]


def test_a_late_record_stays_late_after_a_recovery() -> None:
    late = record_of("tracking", 2, 299, "a")
    model = recovering(record_of("tracking", 1, 400), late, recovered={"a": [350]})
    assert model.late == [LateRecord(late, 400)]
    assert model.passed == []


def test_heartbeats_are_never_already_published() -> None:
    assert recovering(record_of("tracking", 1, 300), recovered={"": [300], "a": [300]}).passed == []


# -- min_offsets


def test_min_offset_is_the_first_at_a_position_that_reaches_the_event_time() -> None:
    records = [(4, 10), (5, 300), (6, 120), (9, 400)]
    assert [min_offset(records, [], time, 10) for time in (10, 11, 300, 301, 400)] == [
        4,
        5,
        5,
        9,
        9,
    ]


def test_min_offset_is_the_next_offset_where_no_position_reaches_the_event_time() -> None:
    assert min_offset([(4, 10), (5, 300)], [IdleDecision(5, 350)], 351, 7) == 7
    assert min_offset([], [], 0, 0) == 0


def test_an_idle_decision_gives_its_position_to_the_offset_after_it() -> None:
    records = [(4, 10), (7, 300)]
    assert min_offset(records, [IdleDecision(4, 200)], 200, 8) == 5
    assert min_offset(records, [IdleDecision(4, 200)], 201, 8) == 7
    assert min_offset(records, [IdleDecision(-1, 200)], 200, 8) == 0
    assert min_offset([], [IdleDecision(-1, 200), IdleDecision(-1, 300)], 250, 0) == 0


# -- idle decisions


def test_a_message_tells_the_decisions_from_the_offset_before_its_min_offset_on() -> None:
    decisions = {
        "tracking": [IdleDecision(9, 7), IdleDecision(4, 5), IdleDecision(3, 4)],
        "orders": [IdleDecision(3, 4)],
    }
    assert idle_header(decisions, {"tracking": 5, "orders": 5}) == {
        "tracking": (IdleDecision(4, 5), IdleDecision(9, 7))
    }
    assert idle_header(decisions, {"tracking": 4}) == {
        "tracking": (IdleDecision(3, 4), IdleDecision(4, 5), IdleDecision(9, 7))
    }
    assert idle_header({"orders": [IdleDecision(-1, 7)]}, {"tracking": 0, "orders": 0}) == {
        "orders": (IdleDecision(-1, 7),)
    }
    assert idle_header({}, {"tracking": 0, "orders": 0}) == {}


def test_of_several_decisions_after_one_offset_the_last_is_told() -> None:
    decisions = {
        "orders": [
            IdleDecision(4, 10),
            IdleDecision(4, 30),
            IdleDecision(4, 20),
            IdleDecision(6, 40),
        ]
    }
    assert idle_header(decisions, {"orders": 5}) == {
        "orders": (IdleDecision(4, 30), IdleDecision(6, 40))
    }


def test_with_tenants_each_decision_is_told_that_may_have_closed_one_of_the_messages() -> None:
    """Those before are told as one, up to the first that reaches the time just before; those after
    as one as well."""
    times = [10, 40, 97, 99, 100, 150, 200, 250, 300]
    decisions = {"orders": [IdleDecision(4, time, (("x", time - 5),)) for time in times]}

    def told(first: int, last: int) -> list[int]:
        header = idle_header(decisions, {"orders": 0}, CloseTimeRange(first, last, lag_ms=50))[
            "orders"
        ]
        assert all(
            decision.tenant_times == (("x", decision.event_time - 5),) for decision in header
        )
        return [decision.event_time for decision in header]

    assert told(101, 101) == [100, 150, 300], (
        "what a record closes at 101 may take the decision to 150"
    )
    assert told(102, 102) == [150, 300]
    assert told(101, 201) == [100, 150, 200, 250, 300]
    assert told(1000, 1000) == [300]
    assert idle_header(decisions, {"orders": 0})["orders"][0].event_time == 300, (
        "without tenants the last one counts alone"
    )


def test_of_decisions_that_are_told_as_one_the_largest_time_of_each_tenant_counts() -> None:
    first = IdleDecision(4, 100, (("a", 90), ("b", 95), ("\uff61", 41)))
    second = IdleDecision(4, 120, (("a", 85), ("c", 110), ("\U0001f600", 71)))
    header = idle_header(
        {"orders": [second, first]}, {"orders": 5}, CloseTimeRange(900, 900, lag_ms=50)
    )
    assert header == {
        "orders": (IdleDecision(4, 120, (("a", 90), ("b", 95), ("c", 110), ("\U0001f600", 71))),)
    }, "a time that is the lag behind says nothing"


def test_decisions_after_other_offsets_are_told_apart() -> None:
    decisions = {
        "orders": [
            IdleDecision(4, 100),
            IdleDecision(4, 120),
            IdleDecision(6, 130),
            IdleDecision(6, 140),
        ]
    }
    for closed_at, times in ((500, [120, 140]), (90, [100, 120, 140]), (131, [120, 130, 140])):
        header = idle_header(
            decisions, {"orders": 5}, CloseTimeRange(closed_at, closed_at, lag_ms=50)
        )["orders"]
        assert [each.event_time for each in header] == times


# -- headers


def test_headers_are_json_by_source() -> None:
    assert encode_min_offsets({"tracking": 17, "orders": 0}) == b'{"tracking":17,"orders":0}'
    assert (
        encode_idle({"orders": [IdleDecision(16, 1_700_000_000_000)]})
        == b'{"orders":[[16,1700000000000]]}'
    )
    told = IdleDecision(16, 1_700_000_000_000, (("a/b", 1_600_000_000_000), ("\U0001f600", -5)))
    assert (
        encode_idle({"orders": [told]})
        == '{"orders":[[16,1700000000000,{"a/b":1600000000000,"\U0001f600":-5}]]}'.encode()
    )


def test_headers_are_read_as_they_were_written() -> None:
    offsets = {"tracking": 17, "orders": 2**63 - 1}
    told = (("", 0), ("a/b", 1_600_000_000_000), ("\uff61", 3), ("\U0001f600", -(2**63)))
    decisions = {
        "orders": (IdleDecision(-1, 0), IdleDecision(16, 1_700_000_000_000, told)),
        "tracking": (),
    }
    assert parsed({MIN_OFFSETS: encode_min_offsets(offsets)}, MIN_OFFSETS) == offsets
    assert parse_idle({IDLE: encode_idle(decisions)}) == decisions


NO_OBJECTS = [None, b"", b"17", b"[]", b"null", b"{", b"\xff", b'{"a":NaN}']


@pytest.mark.parametrize(
    "header",
    [
        *NO_OBJECTS,
        *[
            b"{}",
            b'{"a":-1}',
            b'{"a":1.0}',
            b'{"a":true}',
            b'{"a":"1"}',
            b'{"a":null}',
            b'{"a":1,"b":[]}',
        ],
        b'{"a":9223372036854775808}',
    ],
)
def test_what_is_no_min_offsets_is_refused(header: bytes | None) -> None:
    with pytest.raises(ValueError, match=MIN_OFFSETS):
        parsed({MIN_OFFSETS: header}, MIN_OFFSETS)


@pytest.mark.parametrize(
    "header",
    [
        *NO_OBJECTS,
        *[
            b'{"a":1}',
            b'{"a":[1,2]}',
            b'{"a":[[1]]}',
            b'{"a":[[1,2,3]]}',
            b'{"a":[{}]}',
            b'{"a":[[-2,1]]}',
            b'{"a":[[1,-1]]}',
        ],
        *[
            b'{"a":[[1,2,{"x":1.5}]]}',
            b'{"a":[[1,2,{"x":null}]]}',
            b'{"a":[[1,2,{},3]]}',
            b'{"a":[[1,2,null]]}',
        ],
        *[b'{"a":[[1,2.5]]}', b'{"a":[[true,2]]}', b'{"a":[[1,null]]}', b'{"a":{}}'],
    ],
)
def test_what_is_no_idle_is_refused(header: bytes | None) -> None:
    with pytest.raises(ValueError, match=IDLE):
        parse_idle({IDLE: header})


# -- the sink, read backwards

Message = tuple[Tail, Mapping[str, bytes | None]]
BEGIN = {"tracking": 17, "orders": 3}
RULE = "0000000a"


def said(event_time: int, key: str) -> Tail:
    """What a message says with the timeout."""
    return merged_tail(0, event_time, key, event_time + T, event_time + T + 1)


def plain(event_time: int, key: str) -> Message:
    return said(event_time, key), {SEQ: b"0"}


def telling(
    event_time: int, key: str, begin: Mapping[str, int], **idle: list[IdleDecision]
) -> Message:
    return said(event_time, key), dict(recovery_headers(begin, idle, [RULE]))


def backwards(*messages: Message) -> Iterator[Message]:
    """The sink's messages, from its end."""
    return reversed(messages)


def test_an_empty_sink_says_nothing() -> None:
    assert sink_state([], TIMEOUT) == SinkState({}, {}, ())


def test_the_last_message_with_min_offsets_says_where_to_begin() -> None:
    first, last = (
        telling(300, "a", {"tracking": 1}, tracking=[IdleDecision(0, 9)]),
        telling(310, "a", BEGIN, orders=[IdleDecision(2, 5)]),
    )
    state = sink_state(backwards(first, last), TIMEOUT)
    assert state == SinkState(
        BEGIN,
        {"orders": (IdleDecision(2, 5),)},
        (said(300, "a"), said(310, "a")),
        {RULE},
    )


def test_decisions_are_those_of_the_message_that_says_where_to_begin() -> None:
    state = sink_state(
        backwards(
            telling(300, "a", BEGIN, tracking=[IdleDecision(0, 9)]), telling(310, "a", BEGIN)
        ),
        TIMEOUT,
    )
    assert state.decisions == {}


def test_messages_are_read_back_to_the_timeout_before_it() -> None:
    messages = [
        plain(199, "a"),
        plain(200, "b"),
        plain(200, "c"),
        plain(250, "b"),
        telling(300, "é", BEGIN),
    ]
    state = sink_state(backwards(*messages), TIMEOUT)
    assert state.read_back == (
        said(200, "b"),
        said(200, "c"),
        said(250, "b"),
        said(300, "é"),
    )
    assert by_key(state.read_back) == published({"b": [200, 250], "c": [200], "é": [300]}, T)


def test_messages_after_the_one_that_says_where_to_begin_are_read_back_too() -> None:
    messages = [
        plain(199, "a"),
        plain(200, "b"),
        telling(300, "c", BEGIN),
        plain(900, "d"),
        plain(950, "d"),
    ]
    state = sink_state(backwards(*messages), TIMEOUT)
    assert state.begin == BEGIN
    assert by_key(state.read_back) == published({"b": [200], "c": [300], "d": [900, 950]}, T)


def test_what_sorts_after_the_last_message_comes_again_and_is_not_read_back() -> None:
    early, late = telling(300, "a", {"tracking": 1}), telling(310, "b", BEGIN)
    state = sink_state(
        backwards(
            plain(190, "a"), plain(290, "a"), early, plain(300, "é"), late, early, plain(300, "b")
        ),
        TIMEOUT,
    )
    assert state.begin == {"tracking": 1}
    assert state.read_back == (said(290, "a"), said(300, "a"), said(300, "a"), said(300, "b"))


def test_a_sink_that_says_nowhere_where_to_begin_is_read_whole() -> None:
    assert sink_state(backwards(plain(0, "a"), plain(900, "b")), TIMEOUT) == SinkState(
        {}, {}, (said(0, "a"), said(900, "b"))
    )


# -- rules, and what else lies behind


def test_the_rules_are_those_of_the_message_that_says_where_to_begin() -> None:
    first, last = (
        dict(recovery_headers(BEGIN, {}, rules))
        for rules in (["0000000a"], ["0000000c", "0000000b"])
    )
    assert last[RULES] == b"0000000b,0000000c"
    state = sink_state(
        backwards((said(300, "a"), first), (said(310, "b"), last), plain(310, "c")), TIMEOUT
    )
    assert state.rules == {"0000000b", "0000000c"}
    assert parse_rules(first[RULES]) == {"0000000a"}


def test_a_message_of_an_earlier_version_names_no_rules() -> None:
    state = sink_state([(said(300, "a"), {MIN_OFFSETS: encode_min_offsets(BEGIN)})], TIMEOUT)
    assert (state.begin, state.rules) == (BEGIN, frozenset())
    assert (state.origins, state.life, state.corrected_in) == ({}, "", "")


ORIGINS = {"tracking": Origin("a.1", 7), "orders": Origin("-b.2", 0)}
LIFE_HEADERS = life_headers("0123abcd", ORIGINS, corrected_in="late ones")


def test_a_message_says_what_it_was_made_of_and_whose_it_is() -> None:
    assert [name for name, _ in LIFE_HEADERS] == [FROM, LIFE, CORRECTED_IN]
    headers = dict(recovery_headers(BEGIN, {}, [RULE], LIFE_HEADERS))
    state = sink_state([(said(300, "a"), headers)], TIMEOUT)
    assert (state.origins, state.life, state.corrected_in) == (ORIGINS, "0123abcd", "late ones")


def test_messages_and_records_of_before_a_jump_are_read_again_by_nobody() -> None:
    """A lake is refused that would have to, and no other."""
    earlier: list[tuple[Tail, dict[str, bytes]]] = [(said(199, "a"), {}), (said(200, "b"), {})]
    last = said(300, "c")

    def state(closed_at: int, read_until: dict[str, int]) -> SinkState:
        left = LeftBehind(closed_at, read_until)
        told = dict(recovery_headers(BEGIN, {}, [RULE], life_headers("1", left=left)))
        return sink_state([(last, told), *reversed(earlier)], TIMEOUT)

    first, second = (clock_of(message.place) for message, _ in earlier)
    so_far = state(first, BEGIN)
    assert len(so_far.read_back) == 2
    assert so_far.left == LeftBehind(first, BEGIN)
    for left in (second, BEGIN), (first, {**BEGIN, "orders": BEGIN["orders"] + 1}):
        with pytest.raises(JumpedError):
            state(*left)
    told = dict(recovery_headers(BEGIN, {}, [RULE]))
    for text in (b"one", b"1", b"[1]", b'[1, {"orders": -1}]', b'["1", {}]', b"[1, []]"):
        with pytest.raises(ValueError, match=JUMPED):
            sink_state([(last, {**told, JUMPED: text})], TIMEOUT)


def test_what_is_not_known_of_a_life_has_no_header() -> None:
    assert life_headers("") == []
    assert life_headers("0123abcd") == [(LIFE, b"0123abcd")]


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"[]",
        b'{"a":1}',
        b'{"a":["x"]}',
        b'{"a":["x",1,2]}',
        b'{"a":["x",-1]}',
        b'{"a":["x",true]}',
        b'{"a":[1,1]}',
        b'{"a":["' + b"x" * MAX_HEADER_BYTES + b'",1]}',
    ],
)
def test_what_is_no_from_is_refused(header: bytes | None) -> None:
    with pytest.raises(ValueError, match=FROM):
        parsed({FROM: header}, FROM)


def test_decisions_that_are_long_are_told_compressed_and_too_many_say_that_they_are_not_told() -> (
    None
):
    def told(tenants: int) -> dict[str, bytes]:
        of_all = tuple(
            sorted(
                (sha256(b"%d" % n).hexdigest(), 1_700_000_000_000 + n * 7919)
                for n in range(tenants)
            )
        )
        return dict(
            recovery_headers(
                BEGIN,
                {"orders": [IdleDecision(2, 1_800_000_000_000, of_all)]},
                [RULE],
                LIFE_HEADERS,
            )
        )

    assert list(told(10)) == [MIN_OFFSETS, IDLE, RULES, *dict(LIFE_HEADERS)]
    packed = told(1000)
    assert list(packed) == [MIN_OFFSETS, IDLE_PACKED, RULES, *dict(LIFE_HEADERS)]
    [decision] = sink_state([(said(300, "a"), packed)], TIMEOUT).decisions["orders"]
    assert len(decision.tenant_times) == 1000
    assert list(told(40_000)) == [NO_RECOVERY]
    with pytest.raises(NotToldError):
        sink_state([(said(300, "a"), told(40_000))], TIMEOUT)


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b",",
        b"0000000",
        b"0000000aa",
        b"0000000G",
        b"0000000A",
        b"0000000a,",
        b"0000000a 0000000b",
        b"\xff" * 8,
    ],
)
def test_what_is_no_rules_is_refused(header: bytes | None) -> None:
    with pytest.raises(ValueError, match=RULES):
        parse_rules(header)
    with pytest.raises(ValueError, match=RULES):
        sink_state(
            [(said(300, "a"), {MIN_OFFSETS: encode_min_offsets(BEGIN), RULES: header})], TIMEOUT
        )


# -- with tenants


def closed(closed_at: int, key: str, tenant: str = "") -> Tail:
    return merged_tail(0, 1, key, 0, closed_at, tenant)


def test_with_tenants_messages_are_read_back_to_the_window_and_the_lag_before_the_last_one() -> (
    None
):
    """The records that are passed over are those before the same position."""
    window, lag_ms, last = Window(30, 100), 50, closed(500, "a", "y")
    since = 500 - 1 - 100 - 50
    messages = [
        closed(since, "a"),
        closed(since, "a", "z"),
        closed(since + 1, "a", "x"),
        closed(400, "é", "x"),
    ]
    sink: list[Message] = [(message, {SEQ: b"0"}) for message in messages]
    telling_of_it: Message = last, {MIN_OFFSETS: encode_min_offsets(BEGIN)}
    state = sink_state(backwards(*sink, telling_of_it), window, lag_ms)
    assert state.read_back == (*messages[2:], last)
    assert state.since == since
    assert sink_state(backwards(*sink, telling_of_it), window).since is None
    assert sink_state(backwards(*sink), window, lag_ms) == SinkState({}, {}, tuple(messages))


def test_with_tenants_what_sorts_after_the_last_message_comes_again() -> None:
    early, late = closed(300, "a", "\uff61"), closed(300, "a", "\U0001f600")
    assert early.place < late.place
    headers: dict[str, bytes | None] = {MIN_OFFSETS: encode_min_offsets(BEGIN)}
    state = sink_state(
        backwards((early, headers), (late, headers), (early, headers)), Window(10), 5
    )
    assert state.read_back == (early, early)


def test_no_more_is_read_than_is_needed() -> None:
    sink = backwards(
        plain(0, "never"),
        plain(50, "never"),
        plain(199, "a"),
        plain(200, "b"),
        telling(300, "c", BEGIN),
    )
    sink_state(sink, TIMEOUT)
    assert next(sink) == plain(50, "never")


def test_a_header_that_is_no_such_thing_is_refused() -> None:
    with pytest.raises(ValueError, match=MIN_OFFSETS):
        sink_state([(said(300, "a"), {MIN_OFFSETS: None})], TIMEOUT)
    with pytest.raises(ValueError, match=IDLE):
        sink_state([(said(300, "a"), {MIN_OFFSETS: b'{"a":1}', IDLE: b"[]"})], TIMEOUT)
