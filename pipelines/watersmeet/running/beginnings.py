"""Decides how a lake begins: where it reads first, what of its sink it goes on after, or why it
cannot.

All that `kafka.start` asks for is checked here, before anything is written:

- `earliest`, `latest`, a time or offsets begin a lake whose topics never had a message;
- `sink` takes up a lake that was lost, exactly. The last messages of the sink say from which topics
  and by which rules they were made, and where to read on; all that must be read again or read back
  has to be there still.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

import orjson
from confluent_kafka import Message

from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.recovery import (
    JumpedError,
    NotToldError,
    SinkState,
    parsed,
    sink_state,
    text_of,
)
from watersmeet.core.sequence import (
    CORRECTED,
    FORGOTTEN,
    JUMPED,
    LIFE,
    MERGED,
    MIN_OFFSETS,
    Sequence,
    Tail,
)
from watersmeet.core.texts import topic_and_id
from watersmeet.errors import ConfigurationError, ForeignMessageError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.publisher import Publisher, sequence_tail
from watersmeet.kafka.reading import headers_of, read_backwards, read_tails
from watersmeet.lake.history import Generation, InKafka, read_history
from watersmeet.lake.published import last_tails, last_tails_in, topic_of
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings, StartOffsets, StartTimestamp

COUNTED_RULES: Final = (
    "key, event_time, heartbeat, where, tombstone and schema of each source, tenant, "
    "tenant_max_lag, max_future, "
    "max_record_bytes, max_parts and max_bytes of the merge, and timeout or window"
)
"""The rules of reading and grouping, whose fingerprint messages carry (`Settings.fingerprint`)."""

_ELSEWHERE: Final = "publish to topics with other names"
"""The way out that is always there: new topics get the whole sequences anew."""

_OF_ONE_BATCH: Final = 2
"""How many messages of a batch without a transaction say where a lost lake goes on."""


class Beginning(NamedTuple):
    """The first generation of a lake, and by partition what the messages of its sink say of it.

    There are none unless the lake is taken up from its sink.
    """

    generation: Generation
    states: Mapping[int, SinkState]


def first_beginning(
    settings: Settings, partitions: int, publisher: Publisher | None = None
) -> Beginning:
    """Return the beginning that `kafka.start` asks for, once no transaction is open in the topics.

    `publisher`: the sink's, where it has fenced every other of this pipeline. Raises
    ConfigurationError if a lake cannot begin like that, ForeignMessageError if a message of the
    sink is not Watersmeet's, and OpenTransactionError.
    """
    cluster = Cluster(settings.kafka)
    sink = _Topic.read(settings, settings.publish.topic, partitions, publisher)
    corrections = _Topic.read(settings, settings.publish.corrections_topic, partitions)
    start = settings.kafka.start
    states = dict[int, SinkState]()
    if start == "sink":
        states = {p: _state_of(settings, sink, p) for p in sorted(sink.bounds) if sink.has_had(p)}
        ids = cluster.topic_ids(settings.topics)
        for p, state in states.items():
            _check_inputs(settings, f"{sink.name}[{p}]", state, ids)
            _check_rules(settings, f"{sink.name}[{p}]", state)
        _check_corrections(settings, partitions, sink, states, corrections)
    else:
        _check_unused(settings, sink, corrections)
    in_kafka = read_in_kafka(settings, partitions)
    begin = {
        TopicPartition(input_id, p): offset
        for input_id in settings.inputs
        for p, offset in _begin_of(settings, cluster, input_id, in_kafka, states).items()
    }
    topics = sequence_topics(settings)
    lives = sorted({state.life for state in states.values() if state.life})
    generation = Generation(
        0,
        0,
        begin,
        sink.tails(MERGED, settings) if states else {},
        "sink" if states else "start",
        reason=f"start: {start}",
        life=lives[0] if lives else _new_life(settings, begin, in_kafka, topics),
        correction_tails=corrections.tails(CORRECTED, settings),
        in_kafka=in_kafka,
        topics=topics,
    )
    return Beginning(generation, states)


def read_in_kafka(settings: Settings, partitions: int) -> dict[TopicPartition, InKafka]:
    """Return what Kafka has now of each topic-partition of the sources."""
    cluster = Cluster(settings.kafka)
    ids = cluster.topic_ids(settings.topics)
    return {
        TopicPartition(input_id, p): InKafka(ids[input_id.topic], *bounds)
        for input_id in settings.inputs
        for p, bounds in cluster.bounds(input_id.topic, partitions).items()
    }


def sequence_topics(settings: Settings) -> dict[str, str]:
    """Return, by the table of each sequence that has one, its topic with Kafka's id of it."""
    cluster = Cluster(settings.kafka)
    topics = {sequence.table: topic_of(settings, sequence) for sequence in (MERGED, CORRECTED)}
    return {table: cluster.identified(topic) for table, topic in topics.items() if topic}


def _new_life(
    settings: Settings,
    begin: Mapping[TopicPartition, int],
    in_kafka: Mapping[TopicPartition, InKafka],
    topics: Mapping[str, str],
) -> str:
    """Return a name that no lake has which begins elsewhere, or publishes to other topics."""
    began = sorted((*tp.input, in_kafka[tp].topic_id, tp.partition, at) for tp, at in begin.items())
    facts = orjson.dumps([settings.name, [*topics.values()], began])
    return hashlib.sha256(facts).hexdigest()[:16]


# -- what the topics have


@dataclass(frozen=True)
class _Topic:
    """A topic that the lake publishes to.

    - `bounds`: by partition, the first offset that Kafka has and the end; empty where there is no
      such topic.
    - `last`: by partition, the last message.
    """

    name: str
    bounds: Mapping[int, tuple[int, int]]
    last: Mapping[int, Message]

    @classmethod
    def read(
        cls,
        settings: Settings,
        name: str | None,
        partitions: int,
        publisher: Publisher | None = None,
    ) -> _Topic:
        """Return a topic as it is once no transaction is open there."""
        cluster = Cluster(settings.kafka)
        if name is None or name not in cluster.partition_counts([name]):
            return cls(name or "", {}, {})
        bounds = (
            cluster.settled_bounds(name, partitions)
            if publisher is None
            else publisher.settled_bounds(partitions)
        )
        return cls(name, bounds, read_tails(settings.kafka, name, partitions, bounds))

    def has_had(self, partition: int) -> bool:
        """Return True if a partition has, or ever had, a message."""
        return partition in self.last or self.bounds.get(partition, (0, 0))[0] > 0

    @property
    def used(self) -> str:
        """The sentence's part about what the topic has or had; empty if it never had a message."""
        if self.last:
            return f"{self.name} has messages of a former life"
        firsts = [(first, p) for p, (first, _) in self.bounds.items() if first]
        if not firsts:
            return ""
        first, p = max(firsts)
        return (
            f"{self.name} had messages of a former life (the first offset of {self.name}[{p}] is "
            f"{first:,})"
        )

    def tails(self, sequence: Sequence, settings: Settings) -> dict[int, Tail]:
        """Return the last message of each partition, by what it says."""
        return {p: _tail_of(message, sequence, settings) for p, message in self.last.items()}


def _tail_of(message: Message, sequence: Sequence, settings: Settings) -> Tail:
    return sequence_tail(message, sequence, settings.merge.window.gap_ms)


def read_last_messages(
    settings: Settings, partitions: int, sequence: Sequence = MERGED
) -> dict[int, Tail]:
    """Return the last message that each partition of a sequence's topic has now; none without a
    topic.
    """
    topic = topic_of(settings, sequence)
    if topic is None or topic not in Cluster(settings.kafka).partition_counts([topic]):
        return {}
    last = read_tails(settings.kafka, topic, partitions)
    return {p: _tail_of(message, sequence, settings) for p, message in last.items()}


def read_last_published(
    reader: TableReader, settings: Settings, partitions: int, sequence: Sequence = MERGED
) -> dict[int, Tail]:
    """Return the last message that each partition of a sequence's topic has had, as far as the lake
    knows; of corrections that end, of the topic that they went to.

    That is the one in `published` where retention has emptied the partition, or where a message
    that is not there counts as published.
    """
    topic = topic_of(settings, sequence)
    sink = None if topic is None else Cluster(settings.kafka).identified(topic)
    noted = last_tails(reader, sequence, sink)
    tails = read_last_messages(settings, partitions, sequence)
    return {
        p: max((seen[p] for seen in (tails, noted) if p in seen), key=attrgetter("seq"))
        for p in noted.keys() | tails.keys()
    }


def used_topic(settings: Settings, name: str, partitions: int) -> str:
    """Return the sentence's part about what a topic has or had; empty if it never had a message."""
    return _Topic.read(settings, name, partitions).used


def has_own_corrections(reader: TableReader, settings: Settings, topic: str) -> bool:
    """Return True where a topic has corrections that the lake has published, whether they are noted
    or not, or has taken up.
    """
    generations = read_history(reader, settings).generations
    taken_up = [
        each.topics.get(CORRECTED.table, "") for each in generations if each.correction_tails
    ]
    is_taken_up = any(topic_and_id(its)[0] == topic for its in taken_up)
    if is_taken_up or last_tails_in(reader, CORRECTED, topic):
        return True
    partitions = Cluster(settings.kafka).partition_counts([topic]).get(topic)
    if not generations or partitions is None:
        return False
    last = read_tails(settings.kafka, topic, partitions).values()
    lives = {text_of(dict(headers_of(message)), LIFE) for message in last} - {""}
    return generations.newest.life in lives


@dataclass
class _Backwards:
    """The messages of a sink's partition from its end backwards, without tombstones.

    `offset`: of the last one that was read; `oldest`: the smallest number; `told`: how many say
    where a lost lake goes on.
    """

    settings: Settings
    sink: _Topic
    partition: int
    offset: int = -1
    oldest: int = -1
    told: int = 0
    is_exhausted: bool = False

    def messages(self) -> Iterator[tuple[Tail, Mapping[str, bytes | None]]]:
        """Yield each with its headers; raise ConfigurationError where one is missing."""
        bounds = self.sink.bounds[self.partition]
        kafka = self.settings.kafka
        for message in read_backwards(kafka, self.sink.name, self.partition, bounds):
            headers = dict(headers_of(message))
            if FORGOTTEN not in headers:
                self.offset = message.offset() or 0
                tail = _tail_of(message, MERGED, self.settings)
                self._check_follows(tail.seq)
                self.oldest = tail.seq if self.oldest < 0 else min(self.oldest, tail.seq)
                self.told += MIN_OFFSETS in headers
                yield tail, headers
        if bounds[0] == 0:
            self._check_follows(-1)
        self.is_exhausted = True

    def _check_follows(self, before: int) -> None:
        missing = self.oldest - 1
        if before < missing and self.settings.publish.delivery != "at_most_once":
            raise ConfigurationError(
                f"{self.sink.name}[{self.partition}] lacks the message with number {missing}, and "
                "has later ones, so that a lost lake would never publish it",
                where="kafka.start",
                fix=_ELSEWHERE,
            )


def _state_of(settings: Settings, sink: _Topic, partition: int) -> SinkState:
    """Return what the messages of a partition say.

    Raises ConfigurationError if they do not say where a lost lake goes on, if what would have to be
    read back, or again, is of before a jump, or if retention has deleted some of it, or its
    producer has given it up.
    """
    topic, merge = sink.name, settings.merge
    first, _ = sink.bounds[partition]
    read = _Backwards(settings, sink, partition)
    messages = read.messages()
    try:
        state = sink_state(messages, merge.window, merge.tenant_max_lag_ms)
    except ValueError:
        raise ForeignMessageError(topic, partition, read.offset, MIN_OFFSETS) from None
    except NotToldError:
        raise ConfigurationError(
            f"{topic}[{partition}]@{read.offset} does not say where a lost lake goes on, since "
            "the idle decisions that it needs, with what each tells its tenants, are more "
            "than fit into a message",
            where="kafka.start",
            fix=_ELSEWHERE,
        ) from None
    except JumpedError:
        raise ConfigurationError(
            "the lake jumped shortly before it was lost: to go on after the last messages of "
            f"{topic}[{partition}], records or messages of before the jump would have to be read "
            "again",
            where="kafka.start",
            fix=_ELSEWHERE,
        ) from None
    if read.is_exhausted and first and read.oldest:
        raise ConfigurationError(
            f"retention has deleted messages of {topic}[{partition}] that a lost lake would have "
            f"to read back: its first offset is {first:,}",
            where="kafka.start",
            fix=_ELSEWHERE,
        )
    is_in_parts = settings.publish.delivery == "at_least_once"
    while is_in_parts and read.told < _OF_ONE_BATCH and next(messages, None):
        pass  # one of the last batch may be missing, however long before the others it was closed
    return state


# -- what is refused


def _check_unused(settings: Settings, *topics: _Topic) -> None:
    if used := [topic.used for topic in topics if topic.used]:
        raise ConfigurationError(
            f"{', and '.join(used)}, which `start: {_named(settings)}` would repeat or leave out",
            where="kafka.start",
            fix=f"start at `sink`, which takes up what was lost, or {_ELSEWHERE}",
        )


def _named(settings: Settings) -> str:
    start = settings.kafka.start
    if isinstance(start, StartTimestamp):
        return "{timestamp: ...}"
    return "{offsets: ...}" if isinstance(start, StartOffsets) else start


def _check_rules(settings: Settings, place: str, state: SinkState) -> None:
    rules = state.rules
    if not rules:
        raise ConfigurationError(
            f"the messages of {place} were made by an earlier version, which did not say by which "
            "rules",
            where="kafka.start",
            fix=_ELSEWHERE,
        )
    if rules == {settings.fingerprint}:
        return
    which = f"The rules that count are {COUNTED_RULES}"
    if settings.fingerprint in rules or len(rules) > 1:
        raise ConfigurationError(
            f"what a lake that goes on after the last messages of {place} would read again was "
            f"read and merged by rules that changed meanwhile ({', '.join(sorted(rules))}; those "
            f"of this configuration are {settings.fingerprint}), so it cannot be taken up exactly",
            where="kafka.start",
            fix=f"{_ELSEWHERE}. {which}",
        )
    raise ConfigurationError(
        f"the last messages of {place} were made by other rules ({', '.join(rules)}) than those "
        f"of this configuration ({settings.fingerprint})",
        where="kafka.start",
        fix=(
            "begin with the former rules, and change them with `watersmeet evolve` then; or "
            f"{_ELSEWHERE}. {which}"
        ),
    )


def _check_inputs(settings: Settings, place: str, state: SinkState, ids: Mapping[str, str]) -> None:
    # `ids`: Kafka's identity of each topic of the configuration.
    inputs = settings.inputs_by_name
    if state.begin.keys() != inputs.keys():
        raise ConfigurationError(
            f"the last messages of {place} were made from {_listed(state.begin)}, and this "
            f"configuration has {_listed(inputs)}",
            where="sources",
            fix=f"name the sources and topics that they were made from, or {_ELSEWHERE}",
        )
    for name, origin in sorted(state.origins.items()):
        topic = inputs[name].topic if name in inputs else name
        if ids.get(topic) != origin.topic_id:
            raise ConfigurationError(
                f"{topic} is another topic than the one that the last messages of {place} were "
                f"made from: Kafka's id of it is {ids.get(topic)}, and was {origin.topic_id}",
                where=f"sources.{name}",
                fix=(
                    "name the topic that they were made from, or, where that was deleted and made "
                    f"again, {_ELSEWHERE}"
                ),
            )


def _check_corrections(
    settings: Settings,
    partitions: int,
    sink: _Topic,
    states: Mapping[int, SinkState],
    corrections: _Topic,
) -> None:
    lives = {state.life for state in states.values()} - {""}
    for p in filter(corrections.has_had, sorted(corrections.bounds)):
        place = f"{corrections.name}[{p}]"
        if p not in states:
            raise ConfigurationError(
                f"{place} has or had messages, and {sink.name}[{p}] has none",
                where="publish.corrections.topic",
                fix=_ELSEWHERE,
            )
        if p not in corrections.last:
            first, _ = corrections.bounds[p]
            raise ConfigurationError(
                f"retention has deleted all messages of {place}, whose first offset is {first:,}, "
                "so that nothing tells which corrections are out",
                where="publish.corrections.topic",
                fix=_ELSEWHERE,
            )
        headers = _last_headers(settings, corrections, p)
        life = text_of(headers, LIFE)
        try:
            left = parsed(headers, JUMPED)
        except ValueError:
            last = corrections.last[p].offset() or 0
            raise ForeignMessageError(corrections.name, p, last, JUMPED) from None
        if left is not None and left.is_beyond(states[p].left):
            raise ConfigurationError(
                f"the lake jumped shortly before it was lost: {place} has corrections of after the "
                f"jump, and {sink.name}[{p}] no message",
                where="kafka.start",
                fix=_ELSEWHERE,
            )
        if life and lives and life not in lives:
            raise ConfigurationError(
                f"the last message of {place} is of another life ({life}) than those of "
                f"{sink.name} ({', '.join(sorted(lives))})",
                where="publish.corrections.topic",
                fix=f"name the topic of that life, or {_ELSEWHERE}",
            )
    for name in sorted({state.corrected_in for state in states.values()} - {"", corrections.name}):
        if used := used_topic(settings, name, partitions):
            raise ConfigurationError(
                f"{used}: the corrections of the lake that published to {sink.name}, where this "
                "configuration does not go on",
                where="publish.corrections.topic",
                fix=f"set it to {name}, or {_ELSEWHERE}",
            )


def _last_headers(settings: Settings, topic: _Topic, partition: int) -> Mapping[str, bytes | None]:
    """Return the headers of the last message of a partition that is no tombstone."""
    bounds = topic.bounds[partition]
    for message in read_backwards(settings.kafka, topic.name, partition, bounds):
        headers = dict(headers_of(message))
        if FORGOTTEN not in headers:
            return headers
    return {}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


# -- where reading begins


def _begin_of(
    settings: Settings,
    cluster: Cluster,
    input_id: InputId,
    in_kafka: Mapping[TopicPartition, InKafka],
    states: Mapping[int, SinkState],
) -> dict[int, int]:
    """Return, by partition, the offset at which an input begins.

    Raises ConfigurationError if Kafka does not have it, unless the loss is accepted.
    """
    start = settings.kafka.start
    topic = input_id.topic
    bounds = {
        tp.partition: (kafka.first_offset, kafka.end_offset)
        for tp, kafka in in_kafka.items()
        if tp.input == input_id
    }
    firsts = {p: first for p, (first, _) in bounds.items()}
    if start == "latest":
        return {p: end for p, (_, end) in bounds.items()}
    if isinstance(start, StartTimestamp):
        return cluster.offsets_at(topic, len(bounds), start.timestamp_ms)
    name = settings.input_names[input_id]
    if isinstance(start, StartOffsets):
        named = start.offsets.get(name, {})
        _check_offsets(topic, named, bounds)
        return {**firsts, **named}
    begin = {p: state.begin[name] for p, state in states.items()}
    _check_kept(settings, topic, begin, bounds)
    return {**firsts, **begin}


def _check_offsets(
    topic: str, named: Mapping[int, int], bounds: Mapping[int, tuple[int, int]]
) -> None:
    if beyond := sorted(named.keys() - bounds.keys()):
        raise ConfigurationError(
            f"{topic} has no partition {beyond[0]}",
            where="kafka.start",
            fix=f"name partitions from 0 to {len(bounds) - 1}",
        )
    for p, offset in named.items():
        if offset > bounds[p][1]:
            raise ConfigurationError(
                f"{topic}[{p}] ends at offset {bounds[p][1]}, and {offset} is beyond",
                where="kafka.start",
                fix="name one up to there",
            )


def _check_kept(
    settings: Settings,
    topic: str,
    begin: Mapping[int, int],
    bounds: Mapping[int, tuple[int, int]],
) -> None:
    """Raise ConfigurationError if Kafka no longer has what a lost lake has to read again."""
    for p, offset in sorted(begin.items()):
        first, end = bounds[p]
        if offset > end:
            raise ConfigurationError(
                f"{topic}[{p}] ends at offset {end}, and a lost lake would go on at {offset}: it "
                "has lost its end, or is another topic",
                where="kafka.start",
                fix=_ELSEWHERE,
            )
        if offset < first and settings.kafka.on_data_loss == "stop":
            raise ConfigurationError(
                f"Kafka no longer has offsets of {topic}[{p}] that a lost lake has to read again: "
                f"{offset} to {first - 1}",
                where="kafka.start",
                fix=f"accept the loss with kafka.on_data_loss: continue, or {_ELSEWHERE}",
            )
