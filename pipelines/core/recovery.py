"""A lost lake is taken up from the sink alone: what a message must say for that, and what is read out of the messages then.

Let M be the last message that says from which offsets to begin, and E its event time. Whatever sorts after M has all of its
parts at positions >= E, so nothing before the first offset at such a position is needed, and that offset's record (or the
decision before it) sets its position itself. A part at a position w >= E of a record that is already out, with event time e,
has w <= e + T; so e >= E - T, and messages so far back are enough to know it by. Conversely an on-time record of that key with
w <= e + T was merged into that record, or into an earlier one of its key, which sorts before it and is out as well. Beginning
earlier would do harm: some parts of a record that is out, but not read back, would be merged anew and take later ones in. So
E must be the event time of the very message that carries the header, not that of another one of its batch.

A message that says nothing must have been made with no other idle decisions than the last one before it that does. So the last
message of a transaction is enough to say it, but where a batch may come out in part (`at_least_once`), the first must as well:
a record that timed out on a decision which the sink does not know would be out without the parts that it waits for now.

Where the timeout has changed (decision 36), a part joined by the timeout of the epoch that merged it, and the message timed out
in that epoch or a later one: so T is the longest of these. The message says where they ended (`Told`), and they are merged again
in the same stretches. What sorts after M still has no part before E: that does not depend on any timeout.

Where there is, or was, a window by gap, M says when it was closed, C, and no merge record stayed open for longer than L. What
sorts after M is closed at C or later, so that it has no part before X = C - 1 - L, which takes the place of E. A message that was
closed at c holds what came up to c - 1 of its key, and nothing later; so those with c > X are read back.

With tenants, whose clocks are up to a lag behind, X is earlier by that lag. A tenant's position may come out too low only before
X: so a record at such a position is passed over, since it is out, was late or was refused. When a merge record was closed depends
on the position just before the record, or the decision, that took its tenant's past `due` there. So of the decisions after one
offset, the message says each that may have closed something from M on (`idle_header`). Where windows or lags have changed, a lake
cannot be taken up.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from pipelines.core.idle import IdleDecision
from pipelines.core.plan import Stretch
from pipelines.core.sequence import EPOCHS, IDLE, IDLE_PACKED, MIN_OFFSETS, NO_RECOVERY, PLAIN, Place, place_of
from pipelines.core.window import Window

Decisions: TypeAlias = Mapping[str, Iterable[IdleDecision]]
"""Those of the idle policy, by source."""


RECOVERY_BYTES: Final = 900 * 1024
"""So many bytes the headers have at most from which a lost lake is taken up: the sink takes 1 MiB beside `max_bytes`."""

PLAIN_BYTES: Final = 16 * 1024
"""So many bytes of idle decisions are told as they are, more of them compressed."""


class NotToldError(Exception):
    """The last message that could say where a lost lake goes on says that it does not (`NO_RECOVERY`)."""


class Closings(NamedTuple):
    """With tenants, the messages for which a header is: when the first and the last of them were closed, and the lag (ms)."""

    first: int
    last: int
    lag_ms: int

    def step(self, position: int) -> int:
        """By the positions (ms) just before two decisions: where this is the same, they can be told as one.

        A decision closes merge records just after that position, or later. All before the first message are out, and none after
        the last one is.
        """
        return min(max(position, self.first - 2), self.last)


class ReadBack(NamedTuple):
    """A message of the sink, as far as the merge must know it again; times in ms, `due` and `closed_at` where it says them.

    `tenant` is empty where there are no tenants.
    """

    event_time: int
    key: str
    due: int | None = None
    closed_at: int | None = None
    tenant: str = ""

    @property
    def place(self) -> Place:
        """Where it stands in the order of publication."""
        return place_of(self.event_time, self.key, self.due, self.closed_at, self.tenant)


class Told(NamedTuple):
    """What a message says of the windows that its partition has had: the lake's first, and its own.

    `stretches`: those that ended with a clock that reaches the records that are to be read again; the last of them may be without
    offsets (`Stretch`). `horizon`: the largest one of those that ended before (ms), if any did. `is_plain`: whether all before
    these were timeouts, so that the message does not say when it was closed. `longest_ms`: how long a merge record could stay
    open at most under any window of the lake, where not all were timeouts.
    """

    first: Window
    window: Window
    horizon: int | None = None
    stretches: Sequence[Stretch] = ()
    is_plain: bool = True
    longest_ms: int | None = None


@dataclass(frozen=True)
class SinkState:
    """What a lost lake takes from one sink partition.

    `begin`: by source the offset to begin at (a source that is missing: the earliest); `decisions`: by source those of the idle
    policy to take again; `read_back`: the messages already out that parts may still come for, in the sink's order; `told`: what
    the sink says of windows, None where it has no such word; `last`: the last of its messages in the order of publication, also
    of those before a repeat, which come again as they were; `since`: with tenants, the position of its tenant (ms) before which a
    record is passed over, None where the sink does not say where to begin.
    """

    begin: Mapping[str, int]
    decisions: Mapping[str, Sequence[IdleDecision]]
    read_back: Sequence[ReadBack]
    told: Told | None = None
    last: Place | None = None
    since: int | None = None

    @property
    def had_gap(self) -> bool:
        """Whether the lost lake had a window by gap at any time, as its last message tells."""
        was_closed_by_gap = self.last is not None and self.last.closed_at != PLAIN
        return was_closed_by_gap or (self.told is not None and self.told.longest_ms is not None)

    def lived(self, window: Window) -> Told | None:
        """What the lost lake did with its windows, up to a moment at which the last message was finished; None where none was.

        `window`: the one that it had, where the sink does not say. The moment is when the clock first closed the message, but
        after all the ends that it tells of, since its last window began there: nobody can tell how far the clock came after that,
        and nothing that is out depends on it.
        """
        if self.last is None:
            return None
        told = self.told or Told(window, window, is_plain=window.is_timeout)
        closed_at = self.last.time + told.window.gap_ms + 1 if self.last.closed_at == PLAIN else self.last.closed_at
        clock = max([closed_at, *(each.clock + (each.offsets is not None) for each in told.stretches)])
        ended = [stretch for stretch in told.stretches if stretch.offsets is not None]
        return told._replace(stretches=(*ended, Stretch(told.window, clock, None)))


# -- from the lake to a message


def min_offset(records: Iterable[tuple[int, int]], decisions: Iterable[IdleDecision], event_time: int, next_offset: int) -> int:
    """A source's first offset at a position >= `event_time`; where there is none yet, its `next_offset`.

    `records` are (offset, event time in ms) of what was not refused, heartbeats included, in any order; those before the event
    time may be left out, since a position first reaches a time at a record, or after a decision, that has it.
    """
    reached = [offset for offset, time in records if time >= event_time]
    reached += [decision.after_offset + 1 for decision in decisions if decision.event_time >= event_time]
    return min(reached, default=next_offset)


def idle_header(
    decisions: Decisions, min_offsets: Mapping[str, int], closings: Closings | None = None
) -> dict[str, tuple[IdleDecision, ...]]:
    """By source its decisions from the offset before its min_offset on, in order; only sources that have some.

    Of several decisions after one offset only the last counts, since nothing stands between them: so the header does not grow
    while a source is silent. With tenants (`closings`) they are told as one up to the first that may have closed a message, and
    again from the first on that can have closed none: with the largest time of each tenant, where that is not too old to count.
    """
    header = {}
    for source, offset in min_offsets.items():
        told: dict[tuple[int, int], IdleDecision] = {}
        position = 0
        for decision in sorted(each for each in decisions.get(source, ()) if each.after_offset >= offset - 1):
            step = decision.after_offset, 0 if closings is None else closings.step(position)
            told[step] = _as_one(told.get(step, decision), decision, 0 if closings is None else closings.lag_ms)
            position = decision.event_time
        if told:
            header[source] = tuple(told.values())
    return header


def _as_one(one: IdleDecision, other: IdleDecision, lag_ms: int) -> IdleDecision:
    """What both tell together; `other` comes later, after the same offset."""
    event_time = max(one.event_time, other.event_time)
    told = dict(one.told)
    for tenant, time in other.told:
        told[tenant] = max(time, told.get(tenant, time))
    return IdleDecision(one.after_offset, event_time, tuple(sorted(t for t in told.items() if t[1] > event_time - lag_ms)))


def encode_min_offsets(min_offsets: Mapping[str, int]) -> bytes:
    """The header `watersmeet.min_offsets`."""
    return orjson.dumps(dict(min_offsets))


def encode_idle(decisions: Decisions) -> bytes:
    """The header `watersmeet.idle`; a message needs none where there are no decisions."""
    return orjson.dumps({source: [_encoded(decision) for decision in mine] for source, mine in decisions.items()})


def recovery_headers(min_offsets: Mapping[str, int], idle: Decisions, told: Told | None) -> list[tuple[str, bytes]]:
    """The headers of a message from which a lost lake is taken up, of `RECOVERY_BYTES` at most. Where they would have more,
    the message says that it does not say it (`NO_RECOVERY`).
    """
    headers = [(MIN_OFFSETS, encode_min_offsets(min_offsets))]
    if idle:
        text = encode_idle(idle)
        headers.append((IDLE, text) if len(text) <= PLAIN_BYTES else (IDLE_PACKED, zlib.compress(text)))
    if told is not None:
        headers.append((EPOCHS, encode_told(told)))
    size = sum(len(name) + len(content) for name, content in headers)
    return headers if size <= RECOVERY_BYTES else [(NO_RECOVERY, b"%d" % size)]


def _encoded(decision: IdleDecision) -> list[Any]:
    after_offset, event_time, told = decision
    return [after_offset, event_time, *([dict(told)] if told else [])]


def read_again_from(time: int, longest_ms: int | None) -> int:
    """The position (ms) from which a lost lake reads again after a message with this event time (ms); or closed at this time,
    where a merge record could stay open for `longest_ms` at most.
    """
    return time if longest_ms is None else time - 1 - longest_ms


def told_of(lived: Told, stretches: Sequence[Stretch], position: int) -> Told:
    """What a message has to say of the windows up to now, after which records are read again from this position (ms) on; `lived`
    as it would be without stretches, which are all that have ended.

    A stretch whose clock ended before the position has none of these records, and counts for its horizon alone.
    """
    passed = [stretch.horizon for stretch in stretches if stretch.clock < position]
    horizons = [*passed, *([] if lived.horizon is None else [lived.horizon])]
    left = [stretch for stretch in stretches if stretch.clock >= position]
    return lived._replace(horizon=max(horizons, default=None), stretches=left)


def encode_told(told: Told) -> bytes:
    """The header `watersmeet.epochs`; a message needs none where the window never changed."""
    ended = [[s.window.encoded(), s.clock, None if s.offsets is None else dict(s.offsets)] for s in told.stretches]
    first, last = told.first.encoded(), told.window.encoded()
    said = {"first": first, "timeout": last, "horizon": told.horizon, "ended": ended}
    closing = {} if told.longest_ms is None else {"plain": told.is_plain, "longest": told.longest_ms}
    return orjson.dumps(said | closing)


# -- from the sink to a lake


def parse_told(header: bytes | None) -> Told:
    """The inverse of `encode_told`. Raises ValueError where the header is no such thing."""
    try:
        found = orjson.loads(header or b"")
        stretches = tuple(Stretch(Window.decoded(window), clock, offsets) for window, clock, offsets in found["ended"])
        first, last = Window.decoded(found["first"]), Window.decoded(found["timeout"])
        told = Told(first, last, found["horizon"], stretches, found.get("plain", True), found.get("longest"))
        numbers = [number for each in stretches for number in (each.clock, *(each.offsets or {}).values())]
        is_right = all(_is_integer(number, 0) for number in numbers) and type(told.is_plain) is bool
        is_right &= told.horizon is None or _is_integer(told.horizon, -(2**63))
        is_right &= told.longest_ms is None or _is_integer(told.longest_ms, 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        is_right = False
    if not is_right:
        raise ValueError(f"{EPOCHS} is not what a message of Watersmeet says of windows: {header!r}")
    return told


def parse_min_offsets(header: bytes | None) -> dict[str, int]:
    """The inverse of `encode_min_offsets`. Raises ValueError where the header is no such thing."""
    by_source = _by_source(header, MIN_OFFSETS, lambda offset: _is_integer(offset, 0))
    if not by_source:
        raise ValueError(f"{MIN_OFFSETS} names no source")
    return by_source


def parse_idle(header: bytes | None) -> dict[str, tuple[IdleDecision, ...]]:
    """The inverse of `encode_idle`. Raises ValueError where the header is no such thing."""
    by_source = _by_source(header, IDLE, lambda mine: isinstance(mine, list) and all(map(_is_decision, mine)))
    return {source: tuple(_decoded(*each) for each in mine) for source, mine in by_source.items()}


def _idle_of(headers: Mapping[str, bytes | None]) -> dict[str, tuple[IdleDecision, ...]]:
    """The idle decisions that a message tells, in one way or the other."""
    if IDLE_PACKED not in headers:
        return parse_idle(headers[IDLE]) if IDLE in headers else {}
    try:
        return parse_idle(zlib.decompress(headers[IDLE_PACKED] or b""))
    except zlib.error:
        raise ValueError(f"{IDLE_PACKED} is not compressed with zlib") from None


def _decoded(after_offset: int, event_time: int, told: Mapping[str, int] = MappingProxyType({})) -> IdleDecision:
    return IdleDecision(after_offset, event_time, tuple(sorted(told.items())))


def sink_state(
    messages: Iterable[tuple[ReadBack, Mapping[str, bytes | None]]], window: Window, lag_ms: int | None = None
) -> SinkState:
    """What the last message with `min_offsets` says, and every message of which a record may be read again: by the window given,
    or by the longest of those that the message tells of; with tenants, by the lag given as well.

    `messages` come with their headers, those of a sink partition from its end backwards; no more are asked for than are needed. A
    sink without such a message is read whole. What sorts after the sink's last message is passed over: it was out before a repeat
    (`at_least_once`), and since the sequence goes on behind the last message, it comes again as well. Raises ValueError where a
    header is not what it should be, and NotToldError where the messages do not say where to begin.
    """
    begin: dict[str, int] = {}
    decisions: dict[str, tuple[IdleDecision, ...]] = {}
    told: Told | None = None
    tail: Place | None = None
    last: Place | None = None
    since: int | None = None
    read_back, longest_ms = [], window.longest_ms + (lag_ms or 0)
    for message, headers in messages:
        last = message.place if last is None else max(message.place, last)
        tail = message.place if tail is None else tail
        if message.place > tail:
            continue
        if since is None and NO_RECOVERY in headers:
            raise NotToldError
        if since is None and MIN_OFFSETS in headers:
            begin = parse_min_offsets(headers[MIN_OFFSETS])
            decisions = _idle_of(headers)
            told = parse_told(headers[EPOCHS]) if EPOCHS in headers else None
            if told is not None:
                windows = [told.window, *(stretch.window for stretch in told.stretches)]
                longest_ms = told.longest_ms or max(each.longest_ms for each in windows)
            is_plain = message.closed_at is None
            since = read_again_from(message.place.time if is_plain else message.place.closed_at, None if is_plain else longest_ms)
        if since is not None and _last_position(message, longest_ms) < since:
            break
        read_back.append(message)
    return SinkState(begin, decisions, tuple(reversed(read_back)), told, last, None if lag_ms is None else since)


def _last_position(message: ReadBack, longest_ms: int) -> int:
    """The last position (ms) at which a message may hold a record."""
    return message.event_time + longest_ms if message.closed_at is None else message.closed_at - 1


def _by_source(header: bytes | None, name: str, fits: Callable[[Any], bool]) -> dict[str, Any]:
    try:
        value = orjson.loads(header or b"")
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict) or not all(map(fits, value.values())):
        raise ValueError(f"{name} is not what a message of Watersmeet says by source: {header!r}")
    return value


def _is_integer(value: object, least: int) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_decision(value: object) -> bool:
    if not isinstance(value, list) or not 2 <= len(value) <= 3:
        return False
    told = value[2] if len(value) == 3 else {}
    is_told = isinstance(told, dict) and all(_is_integer(time, -(2**63)) for time in told.values())
    return is_told and _is_integer(value[0], -1) and _is_integer(value[1], 0)
