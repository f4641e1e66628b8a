"""Decisions of a lake's last commits that their notes do not have yet.

A process may be just between a commit and its notes, or have been killed there. The next start
writes the notes. Until then `verify` takes them for written, as far as the merge model bears them
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from watersmeet.core.plan import TopicPartition
from watersmeet.errors import Problem
from watersmeet.lake import tables
from watersmeet.lake.commits import ranges_of, unnoted_commit
from watersmeet.lake.generations import Generation
from watersmeet.lake.progress import last_batch
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

Ranges = Mapping[TopicPartition, tuple[int, int]]
"""Offset ranges `[since, until)` by topic-partition."""


class Unnoted(NamedTuple):
    """Missing notes.

    - `batch`: the batch of silver whose notes are missing; None where none are.
    - `consumed`: the offsets of the records of which `late` or `duplicates` may lack some.
    - `refused`: the offsets of bronze's last commit, whose refused records `quarantine` lacks.
    - `refused_inputs`: the names of their inputs, in order.
    - `has_ids`: True where there may be duplicates.
    """

    batch: int | None
    consumed: Ranges
    refused: Ranges
    refused_inputs: Sequence[str] = ()
    has_ids: bool = False

    @property
    def warnings(self) -> list[dict[str, str]]:
        """Problems that say what is missing from an answer that relies on the tables."""
        fix = "wait a moment, or start the run, which writes them first"
        noted = "late records and duplicates" if self.has_ids else "late records"
        missing = [] if self.batch is None else [(noted, f"batch {self.batch} of silver")]
        missing += [
            ("refused records", f"the last batch of {name}") for name in self.refused_inputs
        ]
        return [
            Problem(f"{records} of {origin} may be missing here", origin, fix)._asdict()
            for records, origin in missing
        ]

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader of an answer should know."""
        cut_short = (
            f"batch {self.batch} of silver is committed, and its notes are not written yet; the "
            "next start writes them"
        )
        sentences = [] if self.batch is None else [f"{cut_short}, and it is judged as if it had"]
        return sentences + [
            f"refused records of {name} are not in quarantine yet; the next start writes them, and "
            "they are judged as if it had"
            for name in self.refused_inputs
        ]


def read_unnoted(reader: TableReader, settings: Settings, generation: Generation) -> Unnoted:
    """Return what the notes of a lake's last commits lack.

    Those of silver count only as far as they are of this generation.
    """
    refused: dict[TopicPartition, tuple[int, int]] = {}
    for input_id in settings.inputs:
        bronze = tables.bronze(input_id.source)
        is_there = reader.exists(bronze) and reader.exists(tables.QUARANTINE)
        if is_there and (commit := unnoted_commit(reader, settings, input_id)) is not None:
            ranges = ranges_of(commit.facts["ranges"])
            refused |= {TopicPartition(input_id, p): ends for p, ends in ranges.items()}
    names = sorted({settings.input_names[tp.input] for tp in refused})
    last = last_batch(reader, settings) if unnoted_batch(reader, settings) is not None else None
    if last is None or last[0].generation != generation.number:
        return Unnoted(None, {}, refused, names)
    plan, _, _ = last
    # The first batch of an epoch judges again what waits for its tenant, which may have come long
    # before, and may be late now.
    # A record may also have waited long before it turns out to be a duplicate.
    begins = settings.merge.has_tenants and (plan.epoch > 0 or settings.has_ids)
    consumed = {
        tp: (0 if begins else done.from_offset, done.until_offset)
        for tp, done in plan.ranges.items()
    }
    may_lack = plan.has_late or settings.has_ids
    return Unnoted(plan.batch, consumed if may_lack else {}, refused, names, settings.has_ids)


def unnoted_batch(reader: TableReader, settings: Settings) -> int | None:
    """Return silver's last batch where its notes are not written yet; else None."""
    if not reader.exists(tables.SILVER) or not reader.exists(tables.PROGRESS):
        return None
    last = last_batch(reader, settings)
    noted = reader.summary(tables.PROGRESS, [], {"last": ("max", "batch")})["last"][0].as_py()
    return None if last is None or noted == last[0].batch else last[0].batch


def before_unnoted(snapshot: Snapshot, settings: Settings) -> Snapshot:
    """Return the moment before silver's last batch where its notes are not written yet; else the
    same moment.
    """
    is_noted = unnoted_batch(snapshot, settings) is None
    last = None if is_noted else last_batch(snapshot, settings)
    return snapshot if last is None else snapshot.before(last[2])
