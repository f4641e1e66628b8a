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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import orjson

from pipelines.core.idle import IdleDecision
from pipelines.core.plan import Stretch
from pipelines.core.sequence import EPOCHS, IDLE, MIN_OFFSETS

Decisions: TypeAlias = Mapping[str, Iterable[IdleDecision]]
"""Those of the idle policy, by source."""


class ReadBack(NamedTuple):
    """A message of the sink, as far as the merge must know it again; event time in ms."""

    event_time: int
    key: str


class Told(NamedTuple):
    """What a message says of the timeouts (ms) that its partition has had: the lake's first, and its own.

    `stretches`: those that ended with a clock that reaches the message's event time; the last of them may be without offsets
    (`Stretch`). `horizon`: the largest one of those that ended before (ms), if any did.
    """

    first_ms: int
    timeout_ms: int
    horizon: int | None = None
    stretches: Sequence[Stretch] = ()


@dataclass(frozen=True)
class SinkState:
    """What a lost lake takes from one sink partition.

    `begin`: by source the offset to begin at (a source that is missing: the earliest); `decisions`: by source those of the idle
    policy to take again; `read_back`: the messages already out that parts may still come for, in the sink's order; `told`: what
    the sink says of timeouts, None where it has no such word; `last_time`: the largest event time of its messages (ms), also of
    those before a repeat, which come again as they were.
    """

    begin: Mapping[str, int]
    decisions: Mapping[str, Sequence[IdleDecision]]
    read_back: Sequence[ReadBack]
    told: Told | None = None
    last_time: int | None = None

    def lived(self, timeout_ms: int) -> Told | None:
        """What the lost lake did with its timeouts, up to a moment at which the last message was finished; None where none was.

        `timeout_ms`: the one that it had, where the sink does not say. The moment is when the clock first had passed the message
        by the timeout then: nobody can tell how far it came after that, and nothing that is out depends on it.
        """
        if self.last_time is None:
            return None
        told = self.told or Told(timeout_ms, timeout_ms)
        clock = max([self.last_time + told.timeout_ms + 1, *(each.clock for each in told.stretches if each.offsets is None)])
        ended = [stretch for stretch in told.stretches if stretch.offsets is not None]
        return told._replace(stretches=(*ended, Stretch(told.timeout_ms, clock, None)))


# -- from the lake to a message


def min_offset(records: Iterable[tuple[int, int]], decisions: Iterable[IdleDecision], event_time: int, next_offset: int) -> int:
    """A source's first offset at a position >= `event_time`; where there is none yet, its `next_offset`.

    `records` are (offset, event time in ms) of what was not refused, heartbeats included, in any order; those before the event
    time may be left out, since a position first reaches a time at a record, or after a decision, that has it.
    """
    reached = [offset for offset, time in records if time >= event_time]
    reached += [decision.after_offset + 1 for decision in decisions if decision.event_time >= event_time]
    return min(reached, default=next_offset)


def idle_header(decisions: Decisions, min_offsets: Mapping[str, int]) -> dict[str, tuple[IdleDecision, ...]]:
    """By source its decisions from the offset before its min_offset on, in order; only sources that have some.

    Of several decisions after one offset only the last counts, since nothing stands between them: so the header does not grow
    while a source is silent.
    """
    header = {}
    for source, offset in min_offsets.items():
        last: dict[int, int] = {}
        for after_offset, event_time in decisions.get(source, ()):
            if after_offset >= offset - 1:
                last[after_offset] = max(event_time, last.get(after_offset, event_time))
        if last:
            header[source] = tuple(IdleDecision(*each) for each in sorted(last.items()))
    return header


def encode_min_offsets(min_offsets: Mapping[str, int]) -> bytes:
    """The header `watersmeet.min_offsets`."""
    return orjson.dumps(dict(min_offsets))


def encode_idle(decisions: Decisions) -> bytes:
    """The header `watersmeet.idle`; a message needs none where there are no decisions."""
    return orjson.dumps({source: [list(decision) for decision in mine] for source, mine in decisions.items()})


def told_of(stretches: Sequence[Stretch], timeout_ms: int, first_ms: int, horizon: int | None, event_time: int) -> Told:
    """What a message with this event time (ms) has to say of the timeouts up to now, this one being the last.

    Records that are read again have positions from the event time on. So a stretch whose clock ended before it has none of them,
    and counts for its horizon alone.
    """
    passed = [stretch.horizon for stretch in stretches if stretch.clock < event_time]
    horizons = [*passed, *([] if horizon is None else [horizon])]
    return Told(first_ms, timeout_ms, max(horizons, default=None), [each for each in stretches if each.clock >= event_time])


def encode_told(told: Told) -> bytes:
    """The header `watersmeet.epochs`; a message needs none where the timeout never changed."""
    stretches = [[*stretch[:2], None if stretch.offsets is None else dict(stretch.offsets)] for stretch in told.stretches]
    return orjson.dumps({"first": told.first_ms, "timeout": told.timeout_ms, "horizon": told.horizon, "ended": stretches})


# -- from the sink to a lake


def parse_told(header: bytes | None) -> Told:
    """The inverse of `encode_told`. Raises ValueError where the header is no such thing."""
    try:
        found = orjson.loads(header or b"")
        stretches = tuple(Stretch(*each) for each in found["ended"])
        told = Told(found["first"], found["timeout"], found["horizon"], stretches)
        numbers = [told.first_ms, told.timeout_ms]
        numbers += [number for each in stretches for number in (*each[:2], *(each.offsets or {}).values())]
        is_right = all(_is_integer(number, 0) for number in numbers)
        is_right &= told.horizon is None or _is_integer(told.horizon, -(2**63))
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError):
        is_right = False
    if not is_right:
        raise ValueError(f"{EPOCHS} is not what a message of Watersmeet says of timeouts: {header!r}")
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
    return {source: tuple(IdleDecision(*each) for each in mine) for source, mine in by_source.items()}


def sink_state(messages: Iterable[tuple[int, str, Mapping[str, bytes | None]]], timeout_ms: int) -> SinkState:
    """What the last message with `min_offsets` says, and every message with event time >= its own - T: the timeout (ms) given, or
    the longest of those that the message tells of.

    `messages` are (event time in ms, key, headers) of a sink partition from its end backwards; no more are asked for than
    are needed. A sink without such a message is read whole. What sorts after the sink's last message is passed over: it was
    out before a repeat (`at_least_once`), and since the sequence goes on behind the last message, it comes again as well.
    Raises ValueError where a header is not what it should be.
    """
    begin: dict[str, int] = {}
    decisions: dict[str, tuple[IdleDecision, ...]] = {}
    told: Told | None = None
    tail: tuple[int, bytes] | None = None
    oldest: int | None = None
    last_time: int | None = None
    read_back = []
    for event_time, key, headers in messages:
        place = event_time, key.encode()
        last_time = event_time if last_time is None else max(event_time, last_time)
        tail = place if tail is None else tail
        if place > tail:
            continue
        if oldest is None and MIN_OFFSETS in headers:
            begin = parse_min_offsets(headers[MIN_OFFSETS])
            decisions = parse_idle(headers[IDLE]) if IDLE in headers else {}
            told = parse_told(headers[EPOCHS]) if EPOCHS in headers else None
            then = [timeout_ms] if told is None else [told.timeout_ms, *(stretch.timeout_ms for stretch in told.stretches)]
            oldest = event_time - max(then)
        if oldest is not None and event_time < oldest:
            break
        read_back.append(ReadBack(event_time, key))
    return SinkState(begin, decisions, tuple(reversed(read_back)), told, last_time)


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
    return isinstance(value, list) and len(value) == 2 and _is_integer(value[0], -1) and _is_integer(value[1], 0)
