"""Lives of a lake: what can happen to it, one after the other, in this process and on a real
broker; and what must hold then."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message
from confluent_kafka import TopicPartition as KafkaPartition

from tests.support.cases import heartbeat
from tests.support.commands import in_process
from tests.support.rivers import River
from tests.support.topics import Access, client_options, produce

NUMBERS = itertools.count()

Lived = TypeVar("Lived", bound="Life")


class KilledError(Exception):
    """Whatever was done ends here, as if its process had been killed."""


@contextmanager
def points_reached(by: Callable[[str], object]) -> Iterator[None]:
    """Inside, this is called with each fault point that is reached, there."""
    named = [
        module
        for name, module in sys.modules.items()
        if name.startswith("watersmeet.") and hasattr(module, "fault_point")
    ]
    with ExitStack() as patched:
        for module in named:
            patched.enter_context(patch.object(module, "fault_point", by))
        yield


@contextmanager
def killed_at(point: str) -> Iterator[None]:
    """Inside, whoever reaches a fault point gets no further; it must be reached."""
    reached = []

    def fault_point(here: str) -> None:
        if here == point:
            reached.append(here)
            raise KilledError(point)

    with points_reached(fault_point):
        yield
    assert reached, f"{point} was not reached"


_consumers: dict[str, Consumer] = {}


def messages_in(kafka: Access, topic: str, partitions: int = 1) -> list[Message]:
    """The messages of a topic, in order by partition. The consumer stays: closing it takes half a
    second."""
    if (name := str(kafka)) not in _consumers:
        options = {
            "group.id": "lives",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
        _consumers[name] = Consumer(
            {**client_options(kafka), **options, "auto.offset.reset": "earliest"}
        )
    consumer, found, left = _consumers[name], list[Message](), partitions
    consumer.list_topics(topic, timeout=30)  # else it would look for the leaders a second later
    consumer.assign([KafkaPartition(topic, p, OFFSET_BEGINNING) for p in range(partitions)])
    while left:
        message = consumer.poll(30)
        assert message is not None, f"{topic} does not answer"
        if (error := message.error()) is not None:
            assert error.code() == KafkaError._PARTITION_EOF, error
            left -= 1
        else:
            found.append(message)
    consumer.unassign()
    return found


def values(kafka: Access, topic: str, partitions: int = 1) -> list[bytes]:
    """The values in a topic, without tombstones, in order by partition."""
    every = [message.value() for message in messages_in(kafka, topic, partitions)]
    return [value for value in every if value is not None]


@dataclass
class Life:
    """A lake and its topics. Each record has a number of its own, `n`."""

    river: River
    sent: int = 0
    keyed: set[int] = field(default_factory=set)
    """The numbers of the records that have a key, and are not refused for it."""

    @classmethod
    def make(
        cls: type[Lived], kafka: Access, folder: Path, partitions: int = 1, **config: Any
    ) -> Lived:
        return cls(
            River.make(
                kafka,
                folder,
                f"life-{os.getpid()}-{next(NUMBERS)}",
                partitions=partitions,
                **config,
            )
        )

    def send(self, source: str, *records: tuple[str | None, int], **more: Any) -> list[int]:
        """Records of keys and event times (ms), a heartbeat where there is no key; answers the
        numbers of those that have one."""
        values, numbers = [], []
        for key, time in records:
            value = {"k": key, "ts": time, "n": self.sent, **more} if key is not None else None
            values.append((0, json.dumps(value).encode() if value is not None else heartbeat(time)))
            if key:
                self.keyed.add(self.sent)
                numbers.append(self.sent)
            self.sent += 1
        produce(self.river.kafka, self.river.topic(source), values)
        return numbers

    def both(self, *records: tuple[str | None, int]) -> list[int]:
        """The same records of both sources."""
        return [*self.send("tracking", *records), *self.send("orders", *records)]

    def run(self, *layers: str) -> None:
        self.river.finish(*layers)

    def call(self, *arguments: str, exit_code: int = 0) -> str:
        """A command, and what it says."""
        self.river.write()
        done = in_process(*arguments, "-c", str(self.river.file), cwd=self.river.folder)
        assert done.returncode == exit_code, (
            f"{arguments}: {done.returncode}, {done.stdout}{done.stderr}"
        )
        return done.stdout + done.stderr

    def configure(self, path: str, value: Any) -> None:
        """Sets a dotted path of the configuration."""
        *parts, last = path.split(".")
        at = self.river.config
        for part in parts:
            at = at.setdefault(part, {})
        at[last] = value
        self.river.write()

    def lose(self, start: Any = "sink") -> None:
        """The lake is lost, and begun anew."""
        shutil.rmtree(self.river.folder / "lake")
        self.configure("kafka.start", start)

    def evolve(self, path: str, value: Any) -> None:
        self.configure(path, value)
        self.call("evolve", "--apply")

    def messages(self) -> list[dict[str, Any]]:
        """The values in the sink, in order by partition."""
        return [
            json.loads(value)
            for value in values(self.river.kafka, self.river.sink, self.river.partitions)
        ]

    def numbers(self) -> Counter[int]:
        """How often each record is in a message."""
        counts: Counter[int] = Counter()
        for message in self.messages():
            for source in self.river.inputs:
                counts.update(value["n"] for value in message[source])
        return counts

    def sent_once(self) -> set[int]:
        """The records that are in a message; none of them is in another one, too."""
        counts = self.numbers()
        assert {n: count for n, count in counts.items() if count != 1} == {}
        return set(counts)

    def check(self) -> None:
        """All that holds for every lake, whatever has happened to it."""
        twice = {number: count for number, count in self.numbers().items() if count > 1}
        assert twice == {}, "no record is in two messages"
        assert self.river.broken_promises() == []
        into = self.river.folder / f"rebuilt-{next(NUMBERS)}"
        self.call("rebuild", "--into", str(into))
        self.call("verify", "--against", str(into))
