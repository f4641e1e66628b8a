"""Dead letters: late and refused records go to topics of their own as well, as they came, each once.

A topic itself says where it stands: the last message of each partition has, by source, the offset up to which the records of
`late`, or of `quarantine`, are out. Both tables grow in order of offset in each topic-partition, so everything from there on is
missing. A publication is made in these steps, by the process that owns gold:

1. *plan*: which records the table has from there on;
2. *read* them in pieces, late ones from bronze, which has their keys and headers;
3. *transaction*: the letters (`core.letters`) of all partitions, in every delivery mode;
4. *note*: in `dead_letters`, up to where it stands now.

After a crash before or in 3 nothing is out, and the next start reads from the topic what is; between 3 and 4, the next start
writes the rows that are missing. They count where retention has emptied a partition of the topic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from confluent_kafka import Message

from pipelines.core.columns import Int64s, in_groups, int64s
from pipelines.core.letters import LATE, NEXT_OFFSETS, Standing, letters, next_offsets
from pipelines.engine import Engine
from pipelines.errors import ForeignMessageError
from pipelines.events import Handled
from pipelines.faults import reach
from pipelines.kafka.cluster import Cluster, dead_letter_settings
from pipelines.kafka.publisher import Publisher, record_publisher
from pipelines.lake import tables
from pipelines.lake.questions import Where, bytes_of, neighbours, within
from pipelines.owner import Owner, now_ms
from pipelines.settings import Settings

PIECE_ROWS = 5_000
"""So many records are read at a time: each is asked for by its offset."""

PIECE_BYTES = 64 * 1024 * 1024
"""About so many bytes of them, as they are in the files."""

PIECES = 20
"""So many pieces go into one transaction."""


class Piece(NamedTuple):
    """Records of one source: by partition, their offsets in order."""

    source: str
    offsets: dict[int, Int64s]


@dataclass
class DeadLetters:
    """The dead letters of the records of one `table`, `late` or `quarantine`, in one `topic`; one owner at a time."""

    owner: Owner
    settings: Settings
    partitions: int
    table: str
    topic: str
    check_owner: Callable[[], None] = lambda: None
    """Asked before an earlier publisher is fenced."""
    _standing: dict[int, dict[str, int]] | None = None
    _version: int | None = field(default=None, repr=False)
    """The version of the table all of whose records are out."""

    def drain(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """Sends every record that the table has beyond what is out; yields how many each transaction sent."""
        while not is_stopping():
            version = self._engine.questions.version(self.table)
            if self._standing is not None and version == self._version:
                return
            standing = self.recover() if self._standing is None else self._standing
            self._standing = None  # after a failure, only the topic knows what is out
            with self.owner.step("gold", "plan"):
                pieces = self._pending(standing)
            after = {p: dict(standing.get(p, {})) for p in range(self.partitions)}
            sent = self._send(pieces[:PIECES], after)
            self._standing = after
            if len(pieces) <= PIECES:
                self._version = version
            if sent:
                self.owner.tell(Handled("gold", {self.topic: {("published", ""): sent}}))
                yield sent

    def recover(self) -> dict[int, dict[str, int]]:
        """Where every partition of the topic stands, as the topic says, and where it is empty, `dead_letters`.

        Afterwards no transaction is open, and `dead_letters` has noted what is out.
        """
        self.check_owner()
        cluster = Cluster(self.settings.kafka)
        if self.topic not in cluster.partition_counts([self.topic]):
            wanted = {**dead_letter_settings(cluster, self.settings), "retention.ms": "-1"}
            cluster.create_topic(self.topic, self.partitions, wanted)
        noted = self._noted()
        self._publisher.begin()
        found = {p: self._stands_at(message) for p, message in self._publisher.tails(self.partitions).items()}
        self._note(found, noted)
        return noted | found

    def _pending(self, standing: Standing) -> list[Piece]:
        """Step 1: what the table has beyond what is out, source by source."""
        pieces: list[Piece] = []
        for source in self.settings.sources:
            since = {p: standing.get(p, {}).get(source, 0) for p in range(self.partitions)}
            beyond: Where = [[("source", "=", source), *terms] for terms in within({p: (at, None) for p, at in since.items()})]
            found = self._engine.questions.select(self.table, ["partition", "offset"], beyond)
            partitions, offsets = int64s(found["partition"]), int64s(found["offset"])
            is_new = offsets >= np.array([since.get(p, 0) for p in range(int(partitions.max(initial=0)) + 1)])[partitions]
            pieces += self._cut(source, partitions[is_new], offsets[is_new])
        return pieces

    def _cut(self, source: str, partitions: Int64s, offsets: Int64s) -> Iterator[Piece]:
        in_all = bytes_of(self._engine.questions, {self._home(source): len(offsets)})
        size = max(1, min(PIECE_ROWS, len(offsets) * PIECE_BYTES // in_all if in_all else PIECE_ROWS))
        order = np.lexsort((offsets, partitions))
        for begin in range(0, len(order), size):
            rows = order[begin : begin + size]
            by_partition, firsts = in_groups(partitions[rows], offsets[rows])
            of_partitions = np.split(rows[by_partition], firsts[1:])
            yield Piece(source, {int(partitions[mine[0]]): offsets[mine] for mine in of_partitions})

    def _send(self, pieces: Sequence[Piece], after: dict[int, dict[str, int]]) -> int:
        """Steps 2 to 4; `after`, where the topic stands, moves on."""
        if not pieces:
            return 0
        before = {p: dict(by_source) for p, by_source in after.items()}
        sent = 0

        def made() -> Iterator[pa.Table]:
            nonlocal sent
            for piece in pieces:
                rows = self._records(piece)
                for p, offsets in piece.offsets.items():
                    after[p][piece.source] = int(offsets[-1]) + 1
                sent += rows.num_rows
                yield letters(rows, after)

        reach("letters.publish")
        with self.owner.step("gold", "publish"):
            self._publisher.send(made())
        reach("letters.note")
        with self.owner.step("gold", "note"):
            self._note(after, before)
        return sent

    def _home(self, source: str) -> str:
        """The table that has the records of a source as they came; for a late one, that is bronze."""
        return tables.QUARANTINE if self.table == tables.QUARANTINE else tables.bronze(source)

    def _records(self, piece: Piece) -> pa.Table:
        """Step 2: the records of a piece. Those that bronze no longer keeps are passed over."""
        table = self._home(piece.source)
        is_late = table != tables.QUARANTINE
        columns = ["topic", "partition", "offset", "kafka_timestamp", "key", "value", "headers", *([] if is_late else ["reason"])]
        found = self._engine.fetched(
            self._engine.read(table, columns, self._where(piece, with_source=not is_late), constants={"source": piece.source})
        )
        wanted = {(p, offset) for p, offsets in piece.offsets.items() for offset in offsets.tolist()}
        places = zip(found["partition"].to_pylist(), found["offset"].to_pylist(), strict=True)
        found = found.filter(pa.array([place in wanted for place in places], pa.bool_()))
        return found.append_column("reason", pa.repeat(pa.scalar(LATE), found.num_rows)) if is_late else found

    def _where(self, piece: Piece, *, with_source: bool) -> Where:
        """A piece's records, and perhaps a few more."""
        where = []
        for near in neighbours(sorted(piece.offsets)):
            offsets = sorted(set(chain.from_iterable(piece.offsets[p].tolist() for p in near)))
            source = [("source", "=", piece.source)] if with_source else []
            span = [("partition", "in", list(near)), ("offset", ">=", offsets[0]), ("offset", "<=", offsets[-1])]
            where.append([*source, *span, ("offset", "in", offsets)])
        return where

    # -- where the topic stands

    def _stands_at(self, message: Message) -> dict[str, int]:
        try:
            said = next_offsets(dict(message.headers() or []))
        except ValueError:
            said = {}
        if not said or not said.keys() <= self.settings.sources.keys():
            place = message.topic() or "", message.partition() or 0, message.offset() or 0
            raise ForeignMessageError(*place, NEXT_OFFSETS)
        return said

    def _noted(self) -> dict[int, dict[str, int]]:
        of_topic = [[("sink", "=", self._sink)]]
        by = ["partition", "source"]
        rows = self._engine.questions.summary(tables.DEAD_LETTERS, by, {"next": ("max", "next_offset")}, of_topic).to_pylist()
        noted: dict[int, dict[str, int]] = {}
        for row in rows:
            noted.setdefault(row["partition"], {})[row["source"]] = row["next"]
        return noted

    def _note(self, now: Standing, before: Standing) -> None:
        """Step 4: what has changed."""
        at, sources = now_ms(), self.settings.sources
        rows = [
            (self._sink, source, sources[source].topic, p, offset, at)
            for p, by_source in sorted(now.items())
            for source, offset in by_source.items()
            if offset > before.get(p, {}).get(source, 0)
        ]
        if rows:
            self.owner.append(tables.DEAD_LETTERS, self._engine.lake.layout[tables.DEAD_LETTERS].rows(rows))

    @cached_property
    def _publisher(self) -> Publisher:
        return record_publisher(self.settings, self.settings.name, self.topic)

    @cached_property
    def _sink(self) -> str:
        """The topic, as `dead_letters` names it: one that is made again begins anew."""
        return Cluster(self.settings.kafka).identified(self.topic)

    @property
    def _engine(self) -> Engine:
        return self.owner.engine
