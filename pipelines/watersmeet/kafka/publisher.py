"""A publisher to a topic: one producer for all of its partitions, in one process at a time.

A process may die anywhere, so nothing is assumed about what is out. `exactly_once`:

- `begin` fences an earlier owner and settles what it left (`init_transactions`);
- `tails` reads the topic's last committed messages, which say what is out;
- `send` produces the messages after them in one transaction, and commits it.

After a failure before the commit, no `read_committed` reader sees anything of it. After the commit,
the tails have moved and nothing is published again. A commit whose answer was lost is asked for
again by librdkafka: a late copy of such a request would commit the beginning of the next
transaction. So the next one is another producer's (`has_begun`), whose epoch fences the copy.

`at_least_once` sends without a transaction: a failure may leave a part, and the next attempt goes
on after it; a message that a dying producer had under way may come once more, with the same number.
`at_most_once` does the same, but its caller notes before what it sends, and never repeats it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message

from watersmeet.core.dead_letters import CODEC
from watersmeet.core.sequence import MESSAGES, Sequence, Tail
from watersmeet.errors import (
    FencedError,
    ForeignMessageError,
    KafkaRequestError,
    KafkaTransientError,
    KafkaUnsettledError,
    OpenTransactionError,
    PublishingError,
    TransactionTimeoutError,
    WatersmeetError,
)
from watersmeet.faults import fault_point
from watersmeet.kafka.cluster import BESIDE_VALUES, LARGEST_RECORD, TIMEOUT_S, Cluster
from watersmeet.kafka.failures import failure, is_passing
from watersmeet.kafka.options import ListeningProducer, queue_kbytes
from watersmeet.kafka.permissions import transactional_id
from watersmeet.kafka.reading import headers_of, read_tails
from watersmeet.settings import KafkaSettings, Settings

TRANSACTION_TIMEOUT_S = 300
"""Timeout of a transaction, which takes seconds; brokers allow 15 minutes."""

LONGEST_S = 150
"""Seconds after which a transaction is given up: half of its timeout is left for its end."""

PRODUCE_TIMEOUT_S = 120
"""Seconds that a broker may take to acknowledge, well within the transaction's own timeout."""

REDRIVE: Final = "redrive"
REPARTITION: Final = "repartition"
"""Roles that send to the topics of sources, each with a transactional id for each topic."""

PROMPT_S = 3.0
"""Seconds within which a coordinator of transactions mostly answers; a request is tried again
later.
"""

LATE_S = 60.0
"""Seconds after which no copy of a request that was tried again comes any more."""

_SLICE_S = 0.1
"""Seconds that a client works before its errors are looked at."""

CHUNK = 10_000
"""Number of messages that are produced between two looks at what the broker said."""

_FENCED: Final = {
    KafkaError._FATAL,
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
}
"""Errors of a fenced producer, also by a transaction that outlived its timeout."""

_CURED_BY_A_NEW_PRODUCER: Final = {
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.INVALID_TXN_STATE,
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    KafkaError.UNKNOWN_PRODUCER_ID,
}
_TOO_LARGE: Final = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
_HOPELESS: Final = {KafkaError.INVALID_RECORD, KafkaError.INVALID_TIMESTAMP}
"""Errors that the same message meets again, although only an abort is asked for."""

_RAISED = (KafkaException, SystemError)
"""The exceptions that a producer raises.

While a fatal error is being raised, confluent-kafka still calls delivery callbacks, and Python
makes a SystemError of the two, with the fatal error as its cause.
"""

Offsets = Mapping[int, int | None]
"""By partition, the offset of the last message that was sent, if the broker has reported it."""

log = logging.getLogger("watersmeet.kafka")


class _NotMeantError(Exception):
    """The end of a transaction that was to be aborted."""


def _give_up(_: Offsets) -> None:
    raise _NotMeantError


class Publisher:
    """A writer to one topic, for one thread, of messages up to `max_bytes` (key, headers included).

    Call `begin` first, and again wherever it has not begun, such as after any error; then read
    `tails`, and `send` as often as there is something to send.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        name: str,
        topic: str,
        max_bytes: int,
        *,
        role: str = "",
        is_transactional: bool = True,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._kafka = kafka
        self._topic = topic
        self._max_bytes = max_bytes
        self.transactional_id = transactional_id(name, topic, role)
        """The id by which Kafka fences an earlier publisher when a later one begins."""
        self._is_transactional = is_transactional
        self._options = options or {}
        self._producer: ListeningProducer | None = None
        self._may_fence_itself_until = 0.0
        """Time (monotonic) until which a late copy of a `begin` may come, which fences this one."""
        self._began: float | None = None
        """The time at which the transaction under way began (monotonic)."""

    @property
    def has_begun(self) -> bool:
        """False where `begin` comes before the next `send`, and what is out is read again.

        So it is at first, after an error, and after a transaction of which a request may still be
        under way: a connection has broken, or the commit was slow.
        """
        return self._producer is not None

    def begin(self) -> None:
        """Fence the previous publisher of this name and topic, and settle its open transaction.

        A publisher without transactions does so too, since an earlier run may have had them. Raises
        KafkaAccessError or KafkaTransientError.
        """
        self._producer = None
        producer = self._made(
            transactional_id=self.transactional_id,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_S * 1000,
        )
        is_answered = False
        try:
            self._init_transactions(producer)
            is_answered = not producer.trouble
        except _RAISED as error:
            raise self._failure(producer, _reason(error)) from None
        finally:
            if not is_answered:  # also where it has given up: what it asked is still under way
                self._may_fence_itself_until = time.monotonic() + LATE_S
        self._producer = producer if self._is_transactional else self._made()
        fault_point("publisher.begin")

    def _made(self, **own: Any) -> ListeningProducer:
        largest = min(self._max_bytes, 1_000_000_000)
        # The largest message fits, alone.
        return ListeningProducer(
            self._kafka,
            # Without a transaction, a message that is given up alone leaves a gap: the publisher
            # gives up all that it has (`_flush`).
            delivery_timeout_ms=PRODUCE_TIMEOUT_S * 1000 if "transactional_id" in own else 0,
            message_max_bytes=largest,
            queue_buffering_max_kbytes=max(queue_kbytes(self._kafka), largest // 1024 + 1),
            **self._options,
            **own,
        )

    def _init_transactions(self, producer: ListeningProducer) -> None:
        # In short attempts, each of which goes on with the last. Where this takes long, the cluster
        # is asked whether transactions are possible.
        since = time.monotonic()
        is_asked = False
        while True:
            try:
                return producer.init_transactions(_SLICE_S)
            except KafkaException as error:
                if not is_passing(error.args[0]):
                    raise
            self._listen(producer, since, TIMEOUT_S)
            if not is_asked and time.monotonic() - since > PROMPT_S:
                is_asked = True
                with suppress(KafkaTransientError):
                    Cluster(self._kafka, PROMPT_S).check_transactions()

    def tails(self, partitions: int) -> dict[int, Message]:
        """Return the last committed message of each partition that holds one (`settled_bounds`)."""
        return read_tails(self._kafka, self._topic, partitions, self.settled_bounds(partitions))

    def settled_bounds(self, partitions: int) -> dict[int, tuple[int, int]]:
        """Return, by partition, the first offset and the end, once no transaction is open there.

        This publisher's own ends with `begin`; one whose end a broker has lost ends here. Raises
        OpenTransactionError after a while, where another producer's is open.
        """
        cluster = Cluster(self._kafka)
        try:
            return cluster.settled_bounds(self._topic, partitions)
        except OpenTransactionError:
            if not (self._is_transactional and self.has_begun):
                raise
            _, behind = cluster.bounds_and_unsettled(self._topic, range(partitions))
            self._abort_in(behind)
            return cluster.settled_bounds(self._topic, partitions)

    def _abort_in(self, partitions: Iterable[int]) -> None:
        """Abort a transaction with a message in each of these partitions.

        Its end is that of an earlier one of this id, too, of which Kafka's coordinator knows that
        it has ended, and the partition does not.
        """
        rows = [{"partition": p, "key": b"", "timestamp": 0} for p in partitions]
        with suppress(_NotMeantError):
            self.send([pa.Table.from_pylist(rows, MESSAGES)], _give_up)
        self.begin()

    def send(
        self, messages: Iterable[pa.Table], check: Callable[[Offsets], None] = lambda _: None
    ) -> dict[int, int | None]:
        """Publish messages, each partition's in order; return the offset of each partition's last
        one.

        An offset is None where the broker has not reported it. Transactional messages are all sent
        in one transaction. Columns: partition, key, value (null: none), timestamp (ms; 0: when it
        is sent), headers. `check` is called with these offsets once Kafka has all messages, before
        the commit; what it raises ends the transaction.

        Where it has not begun any more, `begin` comes before the next one. Raises:

        - FencedError where another publisher has taken over;
        - TransactionTimeoutError where the transaction takes too long;
        - PublishingError, which says whether to try again;
        - KafkaTransientError and KafkaAccessError.
        """
        producer = self._producer
        if producer is None:
            raise RuntimeError("begin() comes before send(), also after an error")
        try:
            return self._send(producer, messages, check)
        except _RAISED as error:
            reason = self._cause(producer, _reason(error))
            self._discard(producer)
            seconds = self._elapsed_s()
            # Kafka has ended it, and fenced the producer.
            is_over = reason.code() in _FENCED and seconds >= TRANSACTION_TIMEOUT_S
            if is_over or (is_passing(reason) and seconds >= PRODUCE_TIMEOUT_S):
                raise TransactionTimeoutError(self._topic, int(seconds)) from None
            raise self._failure(producer, reason) from None
        except BaseException:
            self._discard(producer)
            raise

    # -- sending

    def _send(
        self,
        producer: ListeningProducer,
        messages: Iterable[pa.Table],
        check: Callable[[Offsets], None],
    ) -> dict[int, int | None]:
        offsets: dict[int, int | None] = {}
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            """Note a message's offset by partition, or the error for which it was not taken.

            Where an answer was lost, the broker says of the repeated message that it has it, but
            not where: the offset is None.
            """
            if error is None:
                offsets[message.partition() or 0] = message.offset()
            else:
                failed.append(error)

        sent_to: set[int] = set()
        self._began = None
        chunks = (chunk for part in messages for chunk in part.to_batches(max_chunksize=CHUNK))
        for chunk in filter(len, chunks):
            if not sent_to and self._is_transactional:
                producer.begin_transaction()
                self._began = time.monotonic()
            fault_point("publisher.produce")
            sent_to |= self._produce(producer, chunk, delivered)
            self._check_time()
        if not sent_to:
            return {}
        self._flush(producer)
        if failed and not self._is_transactional:
            raise KafkaException(failed[0])
        check(offsets)
        fault_point("publisher.commit")
        if self._is_transactional:
            self._commit(producer)
        fault_point("publisher.committed")
        return {p: offsets.get(p) for p in sorted(sent_to)}

    def _commit(self, producer: ListeningProducer) -> None:
        # Fails where a message did, and says why.
        since = time.monotonic()
        producer.commit_transaction(PRODUCE_TIMEOUT_S)
        seconds = time.monotonic() - since
        slow = f"the commit took {seconds:.0f} s" if seconds > PROMPT_S else ""
        if trouble := producer.trouble or slow:
            log.info("%s: the next transaction is another producer's (%s)", self._topic, trouble)
            self._producer = None

    def _produce(
        self, producer: ListeningProducer, chunk: pa.RecordBatch, delivered: Callable[..., None]
    ) -> set[int]:
        partitions, keys, values, timestamps = (
            chunk.column(n).to_pylist() for n in ("partition", "key", "value", "timestamp")
        )
        last_rows = dict(zip(partitions, range(len(partitions)), strict=True))
        # A delivery report costs as much as a message. In a transaction, the commit fails where a
        # message did, so only the last message of each partition gets one, for its offset.
        reported = set(last_rows.values()) if self._is_transactional else range(len(partitions))
        header_lists = _header_lists(chunk.column("headers"))
        rows = zip(values, keys, partitions, timestamps, header_lists, strict=True)
        for i, (value, key, partition, timestamp, headers) in enumerate(rows):
            on_delivery = delivered if i in reported else None
            details = {"timestamp": timestamp, "headers": headers, "on_delivery": on_delivery}
            while True:
                try:
                    producer.produce(self._topic, value, key, partition, **details)
                    break
                except BufferError:
                    if not len(producer):  # the message is larger than the whole queue
                        raise
                    self._flush(producer, len(producer) // 2)
        producer.poll(0)
        return set(last_rows)

    def _flush(self, producer: ListeningProducer, waiting: int = 0) -> None:
        since = time.monotonic()
        last_count = len(producer)
        while (count := producer.flush(_SLICE_S)) > waiting:
            if count < last_count:
                since = time.monotonic()
                last_count = count
            self._check_time()
            self._listen(producer, since, PRODUCE_TIMEOUT_S)

    def _elapsed_s(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _check_time(self) -> None:
        if (seconds := self._elapsed_s()) > LONGEST_S:
            raise TransactionTimeoutError(self._topic, int(seconds))

    # -- failing

    def _listen(self, producer: ListeningProducer, since: float, timeout_s: float) -> None:
        producer.poll(0)
        producer.errors.check(since, timeout_s, "WRITE", f"topic {self._topic}")

    def _discard(self, producer: ListeningProducer) -> None:
        # At once, so that it holds no reader up; where that fails too, `begin` settles it.
        self._producer = None
        with suppress(*_RAISED):
            if self._is_transactional:
                producer.abort_transaction(TIMEOUT_S)
            else:
                producer.purge()

    def _cause(self, producer: ListeningProducer, error: KafkaError) -> KafkaError:
        # A transaction that takes no more messages: committing it is refused with what it failed
        # by.
        if self._is_transactional and error.code() == KafkaError._STATE:
            try:
                producer.commit_transaction(TIMEOUT_S)
            except _RAISED as refused:
                return _reason(refused)
        return error

    def _failure(self, producer: ListeningProducer, error: KafkaError) -> WatersmeetError:
        if error.code() == KafkaError._FATAL:  # what it was has been reported before
            error = producer.errors.last(0) or error
        code = error.code()
        resource = f"topic {self._topic}"
        if code in _FENCED and time.monotonic() < self._may_fence_itself_until:
            return KafkaUnsettledError(
                "a late copy of this process's own request to begin has ended what it had under "
                f"way to {self._topic}",
                fix="if this goes on, look whether one of its brokers is down",
            )
        if code in _FENCED:
            return FencedError(
                f"{self._topic} has been taken over by another process: this one is fenced and "
                "writes nothing more",
                fix="run only one of the two",
            )
        if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            resource = f"transactional id {self.transactional_id}"
        if code in _TOO_LARGE:
            remedy = f"set max.message.bytes of {self._topic} to {self._max_bytes} or more"
            why = f"a message is too large for it ({error.name()}); {remedy}"
            return PublishingError(self._topic, why, retriable=False, is_too_large=True)
        problem = failure(self._kafka, error, "WRITE", resource)
        if not isinstance(problem, KafkaRequestError):
            return problem
        is_curable = error.txn_requires_abort() or code in _CURED_BY_A_NEW_PRODUCER
        return PublishingError(
            self._topic, error.str(), retriable=is_curable and code not in _HOPELESS
        )


def sink_publisher(settings: Settings, topic: str | None = None) -> Publisher:
    """Return the publisher of merge records (or to this topic) as `publish.delivery` says."""
    publish = settings.publish
    max_bytes = publish.max_bytes + BESIDE_VALUES
    return Publisher(
        settings.kafka,
        settings.name,
        topic or publish.topic,
        max_bytes,
        is_transactional=publish.delivery == "exactly_once",
    )


def record_publisher(settings: Settings, topic: str, role: str = "") -> Publisher:
    """Return a publisher in transactions of records of the sources, whatever their size.

    Records are packed: one that was packed when it came may be many times as large as a topic
    takes.
    """
    max_bytes = LARGEST_RECORD + BESIDE_VALUES
    packed = {"compression_type": CODEC}
    return Publisher(settings.kafka, settings.name, topic, max_bytes, role=role, options=packed)


def fence_records(settings: Settings, topic: str, *roles: str) -> None:
    """Keep out whoever sends records to a source's topic in these roles."""
    for role in roles:
        record_publisher(settings, topic, role).begin()


def _reason(error: BaseException) -> KafkaError:
    raised = error if isinstance(error, KafkaException) else error.__cause__
    if not isinstance(raised, KafkaException):
        raise error
    reason: KafkaError = raised.args[0]
    return reason


def _header_lists(headers: pa.Array) -> list[list[tuple[str, str | bytes | None]]]:
    flat = headers.flatten()
    pairs = list(zip(flat.field(0).to_pylist(), flat.field(1).to_pylist(), strict=True))
    ends = headers.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).cumsum().tolist()
    return [pairs[start:end] for start, end in pairwise([0, *ends])]


def sequence_tail(message: Message, sequence: Sequence, timeout_ms: int | None = None) -> Tail:
    """Return where the sequence of a partition stands after its last message.

    `timeout_ms`: as for `Sequence.parse`. Raises ForeignMessageError where it is not ours.
    """
    headers: dict[str, Any] = dict(headers_of(message))
    place = message.topic() or "", message.partition() or 0, message.offset() or 0
    try:
        return sequence.parse(headers, timeout_ms)._replace(offset=place[2])
    except ValueError:
        raise ForeignMessageError(*place) from None
