"""Reads from a sink how a new lake can continue it after the lake that filled it was lost.

The messages say how far the partitions are, and where and by which rules to read on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Final, NamedTuple

from watersmeet.core.recovery import NotToldError, SinkState, sink_state
from watersmeet.core.sequence import (
    CORRECTED,
    FORGOTTEN,
    MERGED,
    MIN_OFFSETS,
    Sequence,
    Tail,
)
from watersmeet.errors import ConfigurationError, ForeignMessageError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.publisher import Publisher, sequence_tail
from watersmeet.kafka.reading import headers_of, read_backwards, read_tails
from watersmeet.lake.published import last_tails
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

COUNTED_RULES: Final = (
    "key, event_time, heartbeat, where, tombstone and schema of each source, tenant, "
    "tenant_max_lag, max_future, "
    "max_record_bytes, and timeout or window"
)
"""The rules of reading and grouping, whose fingerprint messages carry (`Settings.fingerprint`)."""


class Sink(NamedTuple):
    """The last message of each partition that has messages, and what its messages say."""

    tails: Mapping[int, Tail]
    states: Mapping[int, SinkState]


NO_MESSAGES: Final = Sink({}, {})


def read_sink(settings: Settings, partitions: int, publisher: Publisher | None = None) -> Sink:
    """Return what the sink says, once no transaction is open there.

    That is nothing if the sink does not exist or has no messages. `publisher`: the one that has
    fenced every other of this pipeline, if there is one.

    Raises ForeignMessageError if a message is not Watersmeet's. Raises ConfigurationError if the
    messages were made by another merge, or do not say where a lost lake goes on.
    """
    topic = settings.publish.topic
    cluster = Cluster(settings.kafka)
    if topic not in cluster.partition_counts([topic]):
        return NO_MESSAGES
    bounds = (
        cluster.settled_bounds(topic, partitions)
        if publisher is None
        else publisher.settled_bounds(partitions)
    )
    tails = _read_tails(MERGED, settings, topic, partitions, bounds)
    states = {p: _read_state(settings, p, bounds[p]) for p in tails}
    return Sink(tails, {p: state for p, state in states.items() if state.read_back})


def read_last_messages(settings: Settings, partitions: int) -> dict[int, Tail]:
    """Return the last message that each partition of the sink has now; none without a sink."""
    topic = settings.publish.topic
    if topic not in Cluster(settings.kafka).partition_counts([topic]):
        return {}
    return _read_tails(MERGED, settings, topic, partitions)


def read_last_published(
    reader: TableReader, settings: Settings, partitions: int
) -> dict[int, Tail]:
    """Return the last message that each partition of the sink has had, as far as the lake knows.

    That is the one in `published` where retention has emptied the partition, or where a message
    that is not there counts as published.
    """
    noted, tails = last_tails(reader, MERGED), read_last_messages(settings, partitions)
    return {
        p: max((seen[p] for seen in (tails, noted) if p in seen), key=attrgetter("seq"))
        for p in noted.keys() | tails.keys()
    }


def read_last_corrections(settings: Settings, partitions: int) -> dict[int, Tail]:
    """Return the last correction that each partition of their topic has, once no transaction is
    open there; none without such a topic.
    """
    topic = settings.publish.corrections_topic
    cluster = Cluster(settings.kafka)
    if topic is None or topic not in cluster.partition_counts([topic]):
        return {}
    bounds = cluster.settled_bounds(topic, partitions)
    return _read_tails(CORRECTED, settings, topic, partitions, bounds)


def _read_tails(
    sequence: Sequence,
    settings: Settings,
    topic: str,
    partitions: int,
    bounds: Mapping[int, tuple[int, int]] | None = None,
) -> dict[int, Tail]:
    return {
        p: sequence_tail(message, sequence, settings.merge.window.gap_ms)
        for p, message in read_tails(settings.kafka, topic, partitions, bounds).items()
    }


def check_start(settings: Settings, sink: Sink) -> None:
    """Raise ConfigurationError if a lake begun by `kafka.start` would not exactly continue the
    sink.
    """
    start = settings.kafka.start
    topic = settings.publish.topic
    states = sink.states.values()
    if not sink.states or start == "latest":
        return
    if start != "sink" and any(state.is_lived for state in states):
        raise ConfigurationError(
            f"{topic} has messages of a lake that has had idle decisions, other rules or a "
            "jump, which Kafka's records alone do not tell",
            where="kafka.start",
            fix="start at `sink`, or publish to another topic",
        )
    if start not in ("sink", "earliest"):
        return
    for p, state in sink.states.items():
        if not state.begin:
            continue  # nothing says where to begin, so all is read from the first record on
        if not state.rules:
            raise ConfigurationError(
                f"the messages of {topic}[{p}] were made by an earlier version, which did "
                "not say by which rules",
                where="kafka.start",
                fix="publish to another topic",
            )
        if state.rules != {settings.fingerprint}:
            raise _other_rules(settings, f"{topic}[{p}]", state.rules)


def _other_rules(settings: Settings, place: str, rules: Collection[str]) -> ConfigurationError:
    which = f"The rules that count are {COUNTED_RULES}"
    if settings.fingerprint in rules or len(rules) > 1:
        return ConfigurationError(
            f"what a lake that goes on after the last messages of {place} would read again was "
            f"read and merged by rules that changed meanwhile ({', '.join(sorted(rules))}; those "
            f"of this configuration are {settings.fingerprint}), so it cannot be taken up exactly",
            where="kafka.start",
            fix=f"publish to another topic. {which}",
        )
    return ConfigurationError(
        f"the last messages of {place} were made by other rules ({', '.join(rules)}) than those "
        f"of this configuration ({settings.fingerprint})",
        where="kafka.start",
        fix=(
            "begin with the former rules, and change them with `watersmeet evolve` then; or "
            f"publish to another topic. {which}"
        ),
    )


def _read_state(settings: Settings, partition: int, bounds: tuple[int, int]) -> SinkState:
    topic = settings.publish.topic
    merge = settings.merge
    offset = -1

    def messages() -> Iterator[tuple[Tail, Mapping[str, bytes | None]]]:
        """Yield the partition's messages from its end backwards, without tombstones."""
        nonlocal offset
        for message in read_backwards(settings.kafka, topic, partition, bounds):
            headers = dict(headers_of(message))
            if FORGOTTEN not in headers:
                offset = message.offset() or 0
                yield sequence_tail(message, MERGED, merge.window.gap_ms), headers

    try:
        return sink_state(messages(), merge.window, merge.tenant_max_lag_ms)
    except ValueError:
        raise ForeignMessageError(topic, partition, offset, MIN_OFFSETS) from None
    except NotToldError:
        raise ConfigurationError(
            f"{topic}[{partition}]@{offset} does not say where a lost lake goes on, since "
            "the idle decisions that it needs, with what each tells its tenants, are more "
            "than fit into a message",
            where="kafka.start",
            fix="start at `earliest`, and publish to another topic",
        ) from None
