"""A broker of a test's own whose partitions lose their ends, as by a power cut: it is killed, its
files of the log are cut between two batches of records, and it starts again."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from watersmeet.dev import broker

QUICK = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}
"""So that a broker that was killed is soon let in again."""
STARTS_S = 300.0
"""Seconds that its start may take on a machine that is busy."""


class Truncated:
    """The broker in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        address = broker.start(folder, settings=QUICK, timeout_s=STARTS_S).bootstrap_servers
        assert address is not None
        self.bootstrap_servers = address

    def lose(self, cuts: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        """Kill the broker, and start it again without what lies in these topic-partitions from
        about these offsets on. Return where each ends then."""
        process = psutil.Process(broker.status(self.folder).pid)
        process.kill()
        process.wait(30)
        ends = {
            place: _cut(self.folder / "data" / f"{place[0]}-{place[1]}", at)
            for place, at in cuts.items()
        }
        broker.start(self.folder, settings=QUICK, timeout_s=STARTS_S)
        return ends


def _cut(folder: Path, at: int) -> int:
    """Cut the log of a partition at the first batch that begins at an offset or later; return that
    batch's offset, or the end."""
    end = -1
    is_cut = False
    for log in sorted(folder.glob("*.log")):
        if is_cut:
            log.unlink()
            continue
        content = log.read_bytes()
        place, end = 0, max(end, int(log.stem))
        while place < len(content) and not is_cut:
            begin, size = struct.unpack(">qi", content[place : place + 12])
            is_cut = begin >= at
            if not is_cut:
                # A batch says how far its last offset is from its first one.
                end = begin + struct.unpack(">i", content[place + 23 : place + 27])[0] + 1
                place += 12 + size
        with log.open("r+b") as file:
            file.truncate(place)
    for beside in folder.iterdir():  # which Kafka makes again from the log
        if beside.suffix in (".index", ".timeindex", ".txnindex", ".snapshot"):
            beside.unlink()
    return end


@contextmanager
def truncated(folder: Path) -> Iterator[Truncated]:
    """A broker that is gone afterwards."""
    made = Truncated(folder)
    try:
        yield made
    finally:
        broker.stop(folder)
