"""Recovery of a lost lake from the sink alone: what messages must say for it, and how it is read.

Let M be the last message that says from which offsets to begin, and C the clock that closed it. No
merge record stayed open for longer than L: the timeout, or the longest window, and with tenants the
lag by which a tenant's clock may be behind.

*From where to read again.* What sorts after M is closed at C or later. So it has no part before
X = C - 1 - L: with a timeout, M's event time. Nothing before the first offset at such a position is
needed, and that offset's record (or the decision before it) sets its position itself.

*Which messages to read back.* A message that was closed at c holds what came up to c - 1 of its
key, and nothing later. So the messages with c > X are enough to know all published parts from X on
by. Conversely, an on-time record of such a key before c was merged into that message, or into an
earlier one of its key, which is published as well.

*Why not to begin earlier.* It would do harm. Some parts of a record that is published, but not read
back, would be merged anew and take later ones in. So C must be that of the very message that has
the header, not that of another one of its batch.

*Which messages have the header.* A message without it used the same idle decisions as the last
message before it that has it. So the last message of a transaction is enough. Where a batch may be
published in part (`at_least_once`), the first message must have it as well. Otherwise, a record
that timed out on a decision which the sink does not know would be published without the parts that
it now waits for.

*With tenants* a tenant's position may come out too low, but only before X. So a record at such a
position is passed over: it is published, was late or was refused. When a merge record was closed
depends on the position just before the record, or the decision, that took its tenant's position
past `due` there. So of the decisions after one offset, the message has each that may have closed
something from M on (`HeaderDecisions`).

*One life.* All that holds of the lake that published M and what is read back. M says from which
topics its generation was made, and where it began there (`FROM`), and a name of its lake's life
that the topic of its corrections repeats (`LIFE`). Where the topics are others, offsets mean other
records, and a lake that goes on would publish twice or never.

*No jump.* A jump goes on at other offsets than those that the messages before it lead to, and a
record has another position than before. What these messages, or corrections, hold is told by
offsets, which the sink does not have, and not by their clocks. So M says when the last message
before the jump was closed, and up to where the lake had read each source by then (`JUMPED`). A lake
that would have to read that message back, or records before that, is refused.

*One set of rules.* All that holds under one set of rules. M says by which rules everything from
these offsets on was read and merged (`RULES`). A lake that is recovered must have these rules, and
no others; otherwise it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
import orjson

from watersmeet.core.headers import MAX_HEADER_BYTES, Natural, header_json, packed
from watersmeet.core.idle import IdleDecision
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
    Headers,
    Place,
    Tail,
    clock_of,
)
from watersmeet.core.window import Window

Decisions: TypeAlias = Mapping[str, Iterable[IdleDecision]]
"""The idle policy's decisions by source."""

_FromBefore: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
"""A number that fits into a column, or -1 for what comes before all."""


RECOVERY_BYTES: Final = 900 * 1024
"""Maximum bytes of the headers from which a lost lake is recovered.

The sink takes 1 MiB beside `max_bytes`.
"""

PLAIN_BYTES: Final = 16 * 1024
"""Maximum bytes of idle decisions that a message has as they are; more are compressed."""


_FINGERPRINT: Final = re.compile("[0-9a-f]{8}")


class NotToldError(Exception):
    """The last message that could say where a lost lake goes on has the header `NO_RECOVERY`."""


class JumpedError(Exception):
    """What would have to be read back, or read again, is of before a jump of the lake."""


class Origin(NamedTuple):
    """Where a generation began to read a partition of an input."""

    topic_id: str
    """Kafka's id of the input's topic."""
    offset: Natural


class LeftBehind(NamedTuple):
    """What a lake has left behind in a partition by its jumps."""

    closed_at: _FromBefore
    """The clock (ms) that closed the last message before the last jump; -1 without one."""
    read_until: Mapping[str, Natural]
    """By source, the exclusive end offset of what was read before a jump."""

    def is_beyond(self, other: LeftBehind | None) -> bool:
        """Return True if a later jump has left this behind than the other."""
        closed_at, read_until = (-2, {}) if other is None else other
        return self.closed_at > closed_at or self.has_read(read_until)

    def has_read(self, begin: Mapping[str, int]) -> bool:
        """Return True if some of what follows these offsets was read before a jump."""
        return any(until > begin.get(source, 0) for source, until in self.read_until.items())


class CloseTimeRange(NamedTuple):
    """Closing times (ms) of the messages that a header is for, with tenants."""

    first: int
    """The clock that closed the first of them."""
    last: int
    """The clock that closed the last of them."""
    lag_ms: int
    """Maximum by which a tenant's clock may be behind the global clock."""

    def step(self, position: int) -> int:
        """Return a number that is equal for decisions that can be described as one.

        `position` (ms) is the one just before a decision. The decision closes merge records just
        after that position, or later. All messages before the first one are published, and none
        after the last one is.
        """
        return min(max(position, self.first - 2), self.last)


@dataclass(frozen=True)
class SinkState:
    """The facts that a lost lake takes from one sink partition."""

    begin: Mapping[str, int]
    """The offset to begin at, by source; a source that is missing begins at the earliest."""
    decisions: Mapping[str, Sequence[IdleDecision]]
    """The decisions of the idle policy to take again, by source."""
    read_back: Sequence[Tail]
    """The messages already published that parts may still come for, in the sink's order."""
    rules: Collection[str] = frozenset()
    """Fingerprints of the rules by which everything from `begin` on was read and merged."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Where the generation of the last message had begun, by source; empty if it does not say."""
    life: str = ""
    """The life of the lake that published it; empty if it does not say."""
    corrected_in: str = ""
    """The topic that its corrections went to; empty if it does not say."""
    left: LeftBehind | None = None
    """What it had left behind by its jumps; None without any."""
    since: int | None = None
    """The tenant position (ms) before which a record is passed over, with tenants.

    None where the sink does not say where to begin.
    """


# -- from the lake to a message


def min_offset(
    records: Iterable[tuple[int, int]],
    decisions: Iterable[IdleDecision],
    event_time: int,
    next_offset: int,
) -> int:
    """Return a source's first offset at a position >= `event_time`.

    Where there is none yet, it is `next_offset`. `records` are (offset, event time in ms) of what
    was not refused, heartbeats included, in any order. Those before the event time may be left out:
    a position first reaches a time at a record, or after a decision, whose own event time reaches
    it.
    """
    reached = [offset for offset, time in records if time >= event_time]
    reached += [
        decision.after_offset + 1 for decision in decisions if decision.event_time >= event_time
    ]
    return min(reached, default=next_offset)


@dataclass
class HeaderDecisions:
    """The decisions about a topic-partition as a header has them, from those that it is given.

    Of several decisions after one offset only the last counts, since nothing stands between them.
    So the header does not grow while a source is silent.

    With tenants (`closings`), the decisions after one offset are described as one up to the first
    that may have closed a message, and again from the first that can have closed none. These have
    the largest time of each tenant, where that is not too old to count.
    """

    closings: CloseTimeRange | None = None
    _by_step: dict[tuple[int, int], IdleDecision] = field(default_factory=dict)
    _position: int = 0

    def add(self, decision: IdleDecision) -> None:
        """Add the next decision."""
        closings = self.closings
        step = decision.after_offset, 0 if closings is None else closings.step(self._position)
        earlier = self._by_step.get(step, decision)
        self._by_step[step] = _as_one(earlier, decision, 0 if closings is None else closings.lag_ms)
        self._position = decision.event_time

    def merged(self) -> tuple[IdleDecision, ...]:
        """Return the decisions of the header, in order."""
        return tuple(self._by_step.values())


def _as_one(one: IdleDecision, other: IdleDecision, lag_ms: int) -> IdleDecision:
    """Return what both decisions say, as one; `other` comes later, after the same offset."""
    event_time = max(one.event_time, other.event_time)
    tenant_times = dict(one.tenant_times)
    for tenant, time in other.tenant_times:
        tenant_times[tenant] = max(time, tenant_times.get(tenant, time))
    return IdleDecision(
        one.after_offset,
        event_time,
        tuple(sorted(t for t in tenant_times.items() if t[1] > event_time - lag_ms)),
    )


def encode_min_offsets(min_offsets: Mapping[str, int]) -> bytes:
    """Return the header `watersmeet.min_offsets`."""
    return orjson.dumps(dict(min_offsets))


def encode_idle(decisions: Decisions) -> bytes:
    """Return the header `watersmeet.idle`, which a message needs only where there are decisions."""
    encoded = {
        source: [
            [*place, *([dict(tenant_times)] if tenant_times else [])]
            for *place, tenant_times in decided
        ]
        for source, decided in decisions.items()
    }
    return orjson.dumps(encoded)


def life_headers(
    life: str,
    origins: Mapping[str, Origin] = MappingProxyType({}),
    left: LeftBehind | None = None,
    corrected_in: str = "",
) -> Headers:
    """Return the headers that say whose a message is; what is not known (empty) has none."""
    by_source = {source: [*origin] for source, origin in origins.items()}
    facts = {FROM: orjson.dumps(by_source).decode() if origins else "", LIFE: life}
    jumped = "" if left is None else orjson.dumps([*left]).decode()
    facts |= {JUMPED: jumped, CORRECTED_IN: corrected_in}
    return [(name, fact.encode()) for name, fact in facts.items() if fact]


def recovery_headers(
    min_offsets: Mapping[str, int],
    idle: Decisions,
    rules: Collection[str],
    life: Sequence[tuple[str, bytes]] = (),
) -> list[tuple[str, bytes]]:
    """Return a message's headers from which a lost lake is recovered, of `RECOVERY_BYTES` at most.

    `life`: as `life_headers` returns them. Where they would have more, or idle decisions more than
    whoever reads them unpacks, the message says instead that it does not have them (`NO_RECOVERY`).
    """
    headers = [(MIN_OFFSETS, encode_min_offsets(min_offsets))]
    text = encode_idle(idle)
    if idle:
        headers.append((IDLE, text) if len(text) <= PLAIN_BYTES else (IDLE_PACKED, packed(text)))
    headers += [(RULES, ",".join(sorted(rules)).encode()), *life]
    size = sum(len(name) + len(content) for name, content in headers)
    fits = size <= RECOVERY_BYTES and len(text) <= MAX_HEADER_BYTES
    return headers if fits else [(NO_RECOVERY, b"%d" % size)]


def read_again_from(closed_at: int, longest_ms: int) -> int:
    """Return the position (ms) from which a lost lake reads again after a message.

    `closed_at` (ms) is the time at which the message was closed, `longest_ms` the longest time that
    a merge record could stay open.
    """
    return closed_at - 1 - longest_ms


# -- from the sink to a lake


class _SaidDecision(NamedTuple):
    after_offset: _FromBefore
    event_time: Natural
    tenant_times: Mapping[str, Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]] = (
        MappingProxyType({})
    )

    def decision(self) -> IdleDecision:
        times = tuple(sorted(self.tenant_times.items()))
        return IdleDecision(self.after_offset, self.event_time, times)


_SAID: Final[Mapping[str, Any]] = {
    MIN_OFFSETS: Annotated[dict[str, Natural], msgspec.Meta(min_length=1)],
    IDLE: dict[str, list[_SaidDecision]],
    IDLE_PACKED: dict[str, list[_SaidDecision]],
    FROM: dict[str, Origin],
    JUMPED: LeftBehind,
}
"""What the headers say that have JSON."""


def parsed(headers: Mapping[str, bytes | None], name: str, otherwise: Any = None) -> Any:
    """Return what a header of JSON says (`_SAID`), or something else where there is none.

    Raise ValueError where it is not what a message of Watersmeet says.
    """
    if name not in headers:
        return otherwise
    try:
        said = header_json(headers[name], is_packed=name == IDLE_PACKED)
        return msgspec.convert(said, _SAID[name])
    except ValueError as error:
        raise ValueError(f"{name} is not what a message of Watersmeet says: {error}") from None


def parse_idle(headers: Mapping[str, bytes | None]) -> dict[str, tuple[IdleDecision, ...]]:
    """Return the idle decisions that a message with these headers has, compressed or not.

    Raise ValueError where a header is not what `recovery_headers` makes.
    """
    by_source = parsed(headers, IDLE_PACKED if IDLE_PACKED in headers else IDLE, {})
    return {source: tuple(each.decision() for each in said) for source, said in by_source.items()}


def parse_rules(header: bytes | None) -> frozenset[str]:
    """Return the fingerprints of rules in the header `watersmeet.rules`.

    Raise ValueError where the header is no such thing.
    """
    fingerprints = (header or b"").decode("ascii", errors="replace").split(",")
    if not all(map(_FINGERPRINT.fullmatch, fingerprints)):
        raise ValueError(f"{RULES} is not what a message of Watersmeet says of rules: {header!r}")
    return frozenset(fingerprints)


def sink_state(
    messages: Iterable[tuple[Tail, Mapping[str, bytes | None]]],
    window: Window,
    lag_ms: int | None = None,
) -> SinkState:
    """Return what the last message with `min_offsets` says, and the messages to read back.

    These are all messages of which a record may be read again by this window and, with tenants, by
    this lag. `messages` are those of a sink partition with their headers, from its end backwards;
    no more are consumed than are needed. A sink without a message with `min_offsets` is read whole.

    What sorts after the sink's last message is passed over. It was published before a repeat
    (`at_least_once`), and it comes again as well, since the sequence goes on after the last
    message.

    Raise ValueError where a header is not what it should be, NotToldError where the messages do not
    say where to begin, and JumpedError where one of these, or what is read again, is of before a
    jump.
    """
    state = SinkState({}, {}, ())
    tail: Place | None = None
    since: int | None = None
    read_back = []
    longest_ms = window.longest_ms + (lag_ms or 0)
    for message, headers in messages:
        tail = message.place if tail is None else tail
        if message.place > tail:
            continue
        if since is None and NO_RECOVERY in headers:
            raise NotToldError
        if since is None and MIN_OFFSETS in headers:
            state = _said(headers)
            if state.left is not None and state.left.has_read(state.begin):
                raise JumpedError
            since = read_again_from(clock_of(message.place), longest_ms)
        # A message holds nothing at or after the clock that closed it.
        if since is not None and clock_of(message.place) <= since:
            break
        if state.left is not None and clock_of(message.place) <= state.left.closed_at:
            raise JumpedError
        read_back.append(message)
    since = None if lag_ms is None else since
    return replace(state, read_back=tuple(reversed(read_back)), since=since)


def _said(headers: Mapping[str, bytes | None]) -> SinkState:
    return SinkState(
        parsed(headers, MIN_OFFSETS),
        parse_idle(headers),
        (),
        parse_rules(headers[RULES]) if RULES in headers else frozenset(),
        parsed(headers, FROM, {}),
        text_of(headers, LIFE),
        text_of(headers, CORRECTED_IN),
        parsed(headers, JUMPED),
    )


def text_of(headers: Mapping[str, bytes | None], name: str) -> str:
    """Return what a header says as text; empty where there is no such header."""
    return (headers.get(name) or b"").decode(errors="replace")
