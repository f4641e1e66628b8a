"""A wire that lies: a proxy on loopback before a broker, which speaks Kafka's frames, and delays,
loses, repeats and holds back what goes through it.

What it does is a text, such as `EndTxn:2=lost EndTxn:2=again:0.5`: of the second such request that
comes, by any connection, the answer is lost, and a copy of the request reaches the broker 0.5 s
later. (`KINDS`.) The answers that name brokers name the proxy instead, so that whoever comes by it
stays with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tests.support.rivers import until

_APIS: Final = {
    0: "Produce",
    1: "Fetch",
    2: "ListOffsets",
    3: "Metadata",
    10: "FindCoordinator",
    18: "ApiVersions",
    22: "InitProducerId",
    24: "AddPartitionsToTxn",
    26: "EndTxn",
    60: "DescribeCluster",
}
"""The requests that faults can name, by their number in the protocol."""

_NAME_BROKERS: Final = ("Metadata", "FindCoordinator", "DescribeCluster")

SLOW, LATE, LOST, CUT, AGAIN, MUTE, DEAF = "slow", "late", "lost", "cut", "again", "mute", "deaf"
KINDS: Final = {
    SLOW: "the request is passed on so many seconds later, and what comes behind it waits",
    LATE: "the same of its answer",
    LOST: "instead of the answer, the connection ends: the broker has done it",
    CUT: "instead of the request, the connection ends: the broker never sees it",
    AGAIN: "a copy of the request reaches the broker so many seconds later, by a connection of its "
    "own; without a number, at `release`",
    MUTE: "no answer comes by this connection any more; so many seconds later it ends",
    DEAF: "the same of the requests",
}
_OFTEN: Final = {
    "EndTxn": (8, 12, (SLOW, LATE, LOST, CUT, AGAIN, AGAIN, AGAIN, MUTE, DEAF)),
    "Produce": (4, 20, (SLOW, LATE, LOST, CUT, AGAIN, MUTE, DEAF)),
    "AddPartitionsToTxn": (3, 10, (SLOW, LATE, LOST, CUT, AGAIN, MUTE, DEAF)),
    # No copy of it comes later: whoever begins is fenced by that, which is no lie.
    "InitProducerId": (2, 8, (SLOW, LATE, LOST, CUT, MUTE, DEAF)),
    "FindCoordinator": (1, 8, (SLOW, LATE, LOST, CUT, MUTE, DEAF)),
    "ListOffsets": (1, 60, (SLOW, LATE, LOST, CUT, MUTE, DEAF)),
    "Fetch": (1, 200, (SLOW, LATE, LOST, CUT, MUTE, DEAF)),
    "Metadata": (1, 60, (SLOW, LATE, LOST, CUT, MUTE, DEAF)),
    "ApiVersions": (1, 30, (SLOW, LATE, LOST, CUT, MUTE, DEAF)),
}
"""By request: how often random faults name it, up to which number, and which of the `KINDS`."""


class Fault(NamedTuple):
    """What happens to the request of this number, and for how many seconds."""

    api: str
    number: int
    kind: str
    seconds: float | None

    @classmethod
    def of(cls, word: str) -> Fault:
        """The fault that a word names."""
        match = re.fullmatch(r"([A-Za-z]+):(\d+)=([a-z]+)(?::([0-9.]+))?", word)
        assert match is not None, word
        api, number, kind, seconds = match.groups()
        assert api in _APIS.values(), word
        assert kind in KINDS, word
        return cls(api, int(number), kind, None if seconds is None else float(seconds))


TRIED_AGAIN: Final = ("EndTxn", "Produce", "AddPartitionsToTxn", "InitProducerId", "Fetch")
"""The requests that clients try again by themselves: no command fails of these faults."""


def random_faults(
    rng: random.Random, count: int, longest_s: float, names: Sequence[str] = tuple(_OFTEN)
) -> str:
    """About so many faults of these requests, none of which takes longer than so many seconds."""
    words = []
    for api in rng.choices(names, [_OFTEN[name][0] for name in names], k=count):
        _, largest, kinds = _OFTEN[api]
        kind, at = rng.choice(kinds), f"{api}:{rng.randint(1, largest)}"
        seconds = longest_s * rng.random() ** 3
        words.append(f"{at}={kind}" + ("" if kind in (LOST, CUT) else f":{seconds:.2f}"))
        if kind == AGAIN:  # only a request that was tried again can come twice
            words.append(f"{at}={rng.choice((LOST, CUT))}")
    return " ".join(words)


@dataclass
class Wire:
    """The proxy before one broker, which listens on loopback without encryption."""

    kafka: str
    faults: Sequence[Fault]
    answered: Counter[str] = field(default_factory=Counter)
    """How many requests of a kind the broker has answered."""
    done: list[str] = field(default_factory=list)
    """Which faults there were."""
    asked: Counter[str] = field(default_factory=Counter)
    """How many there were."""
    _port: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        host, _, port = self.kafka.rpartition(":")
        self._broker = host, int(port)
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()

    @property
    def bootstrap_servers(self) -> str:
        """Where clients of this wire connect to."""
        return f"{self._broker[0]}:{self._port}"

    def release(self) -> None:
        """Let the broker have all copies that have waited for this; returns once it has answered
        them."""
        waiting = len([fault for fault in self.faults if fault[2:] == (AGAIN, None)])
        self._loop.call_soon_threadsafe(self._released.set)
        until(lambda: self.answered[AGAIN] >= waiting, "the answer to a copy", 60)

    def await_answers(self, api: str, count: int) -> None:
        """Return once the broker has answered so many of these requests."""
        until(lambda: self.answered[api] >= count, f"{count} answers to {api}", 60)

    # -- its thread

    def serve(self, started: threading.Event) -> None:
        """Serve until `stop` is called."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen(started))
        self._loop.run_forever()
        self._server.close()
        under_way = asyncio.all_tasks(self._loop)
        for task in under_way:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*under_way, return_exceptions=True))
        self._loop.close()

    def stop(self) -> None:
        """End every connection."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _listen(self, started: threading.Event) -> None:
        self._server = await asyncio.start_server(self._connected, self._broker[0], 0)
        self._port = self._server.sockets[0].getsockname()[1]
        started.set()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._do(self._carry(reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            from_broker, to_broker = await asyncio.open_connection(*self._broker)
            writers.append(to_broker)
            under_way: dict[int, tuple[str, Sequence[Fault]]] = {}
            both = [
                self._do(self._requests(reader, to_broker, under_way)),
                self._do(self._answers(from_broker, writer, under_way)),
            ]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in both:
                task.cancel()
        except OSError:
            pass  # the broker is away
        finally:
            for each in writers:
                each.transport.abort()

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        to_broker: asyncio.StreamWriter,
        under_way: dict[int, tuple[str, Sequence[Fault]]],
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                frame = await _frame(reader)
                key, _, correlation = struct.unpack(">hhi", frame[4:12])
                api = _APIS.get(key, "")
                faults = self._due(api)
                for fault in faults:
                    if fault.kind == AGAIN:
                        self._do(self._repeat(frame, fault))
                for fault in faults:
                    if fault.kind in (SLOW, DEAF):
                        await asyncio.sleep(fault.seconds or 0)
                    if fault.kind in (CUT, DEAF):
                        return
                under_way[correlation] = api, faults
                to_broker.write(frame)
                await to_broker.drain()

    async def _answers(
        self,
        from_broker: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        under_way: dict[int, tuple[str, Sequence[Fault]]],
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                frame = await _frame(from_broker)
                [correlation] = struct.unpack(">i", frame[4:8])
                api, faults = under_way.pop(correlation)
                self.answered[api] += 1
                for fault in faults:
                    if fault.kind in (LATE, MUTE):
                        await asyncio.sleep(fault.seconds or 0)
                    if fault.kind in (LOST, MUTE):
                        return
                writer.write(self._ours(frame) if api in _NAME_BROKERS else frame)
                await writer.drain()

    def _due(self, api: str) -> Sequence[Fault]:
        self.asked[api] += 1
        due = [fault for fault in self.faults if fault[:2] == (api, self.asked[api])]
        now = time.strftime("%H:%M:%S")
        self.done += [f"{now} {f.api}:{f.number}={f.kind}:{f.seconds}" for f in due]
        return due

    async def _repeat(self, frame: bytes, fault: Fault) -> None:
        if fault.seconds is None:
            await self._released.wait()
        else:
            await asyncio.sleep(fault.seconds)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(*self._broker)
            try:
                writer.write(frame[:8] + struct.pack(">i", 2**31 - 1) + frame[12:])
                await _frame(reader)
                self.answered[AGAIN] += 1
            finally:
                writer.transport.abort()

    def _ours(self, frame: bytes) -> bytes:
        # In every version of these answers the port comes right behind the host.
        host, port = self._broker
        return frame.replace(
            host.encode() + struct.pack(">i", port), host.encode() + struct.pack(">i", self._port)
        )


async def _frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(*struct.unpack(">i", head))


@contextmanager
def wire(kafka: str, faults: str = "") -> Iterator[Wire]:
    """A wire to a broker with these faults, and its end."""
    made = Wire(kafka, [Fault.of(word) for word in faults.split()])
    started = threading.Event()
    thread = threading.Thread(target=made.serve, args=[started], daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield made
    finally:
        made.stop()
        thread.join(30)
