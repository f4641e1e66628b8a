"""Writes what a lake has for a topic, in transactions that shrink where the way to Kafka is slow.

The topic itself says how far it is. What was sent is noted in `published`, afterwards.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import Any, Generic, TypeVar

from watersmeet.engine import Engine
from watersmeet.errors import PublishingError, SinkReplacedError, TransactionTimeoutError, kind_of
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.publisher import Offsets, Publisher
from watersmeet.lake import tables
from watersmeet.lake.published import last_noted_ms, topic_columns
from watersmeet.monitoring.events import Failed
from watersmeet.running.owner import Owner, now_ms
from watersmeet.running.transaction_size import TransactionSize
from watersmeet.settings import Settings

Reached = TypeVar("Reached", bound=Mapping[Any, Any])
"""How far the topic is."""

Backlog = TypeVar("Backlog")
"""What is sent next."""

Sent = TypeVar("Sent")
"""What a transaction has sent."""

log = logging.getLogger("watersmeet.gold")


@dataclass
class TopicWriter(ABC, Generic[Reached, Backlog, Sent]):
    """A writer of what a lake has for `partitions` partitions of a topic; one owner at a time."""

    owner: Owner
    settings: Settings
    partitions: int
    check_owner: Callable[[], None] = field(default=lambda: None, kw_only=True)
    """Called before others are fenced: a process that was paused must not fence its successor."""
    now_s: Callable[[], float] = field(default=monotonic, kw_only=True)
    topic: str = field(init=False)
    _publisher: Publisher = field(init=False, repr=False)
    _size: TransactionSize = field(init=False, repr=False)
    _reached: Reached | None = field(default=None, init=False, repr=False)
    _sink: str = field(default="", init=False, repr=False)
    """The topic as `published` names it, with its identity: one that is made again begins anew."""
    _noted_ms: int = field(default=0, init=False, repr=False)
    """Time (epoch ms) of the last row of `published`."""

    def drain(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[Sent]:
        """Send all that the lake has beyond what is out; yield what each transaction sent."""
        while not is_stopping() and self._may_have_more():
            known = self._reached if self._publisher.has_begun else None
            reached = self.recover() if known is None else known
            self._reached = None  # after a failure, only the topic knows what is out
            with self.owner.step("gold", "plan"):
                pending = self._pending(reached)
            if pending is None:
                return  # the lake has not begun
            backlog, size, has_more = pending
            if size and self._sink != self._identified():
                continue  # and recover: the topic was deleted, or created again
            began = self.now_s()
            try:
                now_reached, sent = self._send(backlog, reached)
            except (PublishingError, TransactionTimeoutError) as error:
                if (remedy := self._remedy(error, size)) is None:
                    raise
                log.warning("%s%s", error, remedy)
                self.owner.notify(Failed(kind_of(error), is_retried=True))
                continue
            if size:
                self._size.succeeded(self.now_s() - began, is_full=has_more)
            self._reached = now_reached
            if sent:
                yield sent
            if not has_more:
                return

    def complete(self) -> None:
        """Complete `published`, as the topic says, and remember how far the topic is."""
        if self._reached is None and self._may_have_more():
            self._reached = self.recover()

    def recover(self) -> Reached:
        """Return how far every partition of the topic is, by its last message.

        Afterwards no transaction is open, and `published` covers everything that is out. Raises
        ForeignMessageError where the last message is none that the lake has sent, and
        LakeBehindError where it is one that an earlier copy of the lake does not have.
        """
        self.check_owner()
        if self.topic not in self._cluster.partition_counts([self.topic]):
            self._create_topic()
        self._sink = self._identified()
        self._noted_ms = max(self._noted_ms, last_noted_ms(self._engine.reader))
        self._publisher.begin()
        return self._recovered()

    def _may_have_more(self) -> bool:
        """Return False where there is nothing to send, without asking the topic."""
        return True

    @abstractmethod
    def _create_topic(self) -> None: ...

    @abstractmethod
    def _recovered(self) -> Reached:
        """Return how far the topic is, once the publisher has begun; note what is not noted."""

    @abstractmethod
    def _pending(self, reached: Reached) -> tuple[Backlog, int, bool] | None:
        """Return what is sent next, its size as `_size` counts it, and whether there is more; None
        where the lake has not begun.
        """

    @abstractmethod
    def _send(self, backlog: Backlog, reached: Reached) -> tuple[Reached, Sent]:
        """Send and note what is pending; return how far the topic is then, and what was sent."""

    @abstractmethod
    def _remedy(self, error: Exception, size: int) -> str | None:
        """Return what the next attempt does differently, to be said after the error; None where
        there is nothing to be done about it.
        """

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows about the topic to `published`.

        Later rows get later times, whatever the wall clock was set to: they tell which sink is the
        last.
        """
        if not rows:
            return
        self._noted_ms = max(now_ms(), self._noted_ms + 1)
        noted = {"committed_at": self._noted_ms, **topic_columns(self._sink)}
        layout = self._engine.lake.layout[tables.PUBLISHED]
        self.owner.append(tables.PUBLISHED, layout.rows_of([{**row, **noted} for row in rows]))

    def _check_topic(self, _: Offsets) -> None:
        """Raise SinkReplacedError if the topic is not the one whose end was read."""
        if self._identified() != self._sink:
            raise SinkReplacedError(self.topic)

    def _identified(self) -> str:
        return self._cluster.identified(self.topic)

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self.settings.kafka)

    @property
    def _engine(self) -> Engine:
        return self.owner.engine
