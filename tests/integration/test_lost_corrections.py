"""A lake with corrections is lost, and taken up from its sink: their topic goes on without a gap,
in order, and nothing of it is repeated; a consumer of both topics has each record once."""

from __future__ import annotations

import json
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from tests.support.correction_topic import (
    CorrectionSeen,
    assert_as_the_table_says,
    assert_each_record_once,
    assert_in_sequence,
    corrections_seen,
    messages_of,
    numbers_in,
    versions,
)
from tests.support.effort import first_then_nightly
from tests.support.lives import KilledError, Life, killed_at, messages_in
from tests.support.topics import create_topics
from watersmeet.core.sequence import CORRECTED, MERGED, Sequence
from watersmeet.core.times import time_text
from watersmeet.lake import tables
from watersmeet.lake.history import read_history
from watersmeet.lake.progress import last_batch
from watersmeet.running.lake_sequence import LakeSequence
from watersmeet.running.owner import now_ms

pytestmark = [pytest.mark.promise("R20"), pytest.mark.long, pytest.mark.fault("lost")]

DAY_MS = 86_400_000


class CorrectedLife(Life):
    """A life whose late records are corrected."""

    @property
    def topic(self) -> str:
        return f"{self.river.config['name']}-corrected"

    @classmethod
    def begin(cls, kafka: str, folder: Path, **config: Any) -> CorrectedLife:
        life = cls.make(kafka, folder, **config)
        create_topics(kafka, life.topic, partitions=1)
        life.configure("publish.corrections", {"topic": life.topic, "within": "1d"})
        return life

    def corrections(self) -> list[CorrectionSeen]:
        """What the topic has, which is as it must be."""
        seen = assert_in_sequence(corrections_seen(messages_in(self.river.kafka, self.topic)))
        reader = self.river.reader
        newest = read_history(reader, self.river.settings).generations.newest
        expected = messages_of(reader, newest, self.river.inputs)
        assert_as_the_table_says(seen, expected, newest)
        return seen

    def consumed(self) -> set[int]:
        """The numbers of the records that a consumer of both topics has, each of them once."""
        kafka = self.river.kafka
        messages = [*messages_in(kafka, self.river.sink), *messages_in(kafka, self.topic)]
        return assert_each_record_once([*versions(messages)], self.river.inputs)

    def end(self, numbers: list[int]) -> None:
        """Time goes on, and a consumer of both topics has just these records."""
        self.both((None, 9000))
        self.run()
        assert self.consumed() == set(numbers)
        self.check()

    def correct(self, clock: int, *records: tuple[str, int]) -> list[int]:
        """Late records, and a clock that settles them."""
        numbers = self.send("tracking", *records)
        self.both((None, clock))
        self.run()
        return numbers


def clock_now(life: Life) -> int:
    """The clock (ms) after the last batch; 0 before the first."""
    last = last_batch(life.river.reader) if life.river.folder.joinpath("lake").exists() else None
    return 0 if last is None else last.clocks.get(0, 0)


def test_corrections_go_on_after_the_loss_of_a_lake(kafka: str, tmp_path: Path) -> None:
    """Some late records were corrected before, some wait to be, and some come later, for the same
    merge records and for others."""
    life = CorrectedLife.begin(kafka, tmp_path)
    numbers = life.both(("a", 0), ("b", 50), (None, 1000))
    life.run()
    numbers += life.correct(1100, ("a", 100), ("c", 20), ("c", 20))
    before = life.corrections()
    made = sorted((each.version.key, each.version.version) for each in before)
    assert made == [("a", 1), ("c", 1), ("c", 2)]
    numbers += life.both(("d", 1150))
    numbers += life.send("tracking", ("b", 60))
    life.run()
    life.lose()
    life.run()
    assert life.corrections() == before
    numbers += life.correct(2000, ("a", 150), ("c", 20), ("d", 1160))
    numbers += life.correct(5000, ("d", 1200), ("e", 1500), ("c", 30))
    after = life.corrections()
    assert after[: len(before)] == before
    assert life.consumed() == set(numbers)
    assert {number for each in after for number in numbers_in(each.version.value, ["tracking"])}
    life.check()


@pytest.mark.nightly
def test_what_is_settled_before_a_lake_is_lost_and_not_published_is_published_then(
    kafka: str, tmp_path: Path
) -> None:
    life = CorrectedLife.begin(kafka, tmp_path)
    numbers = life.both(("a", 0), (None, 1000))
    life.run()
    numbers += life.send("tracking", ("a", 100))
    life.both((None, 1100))
    life.run("bronze")
    life.run("silver")
    assert life.river.reader.select(tables.CORRECTIONS, ["offset"]).num_rows == 1
    life.lose()
    life.run()
    assert [each.version.version for each in life.corrections()] == [1]
    assert life.consumed() == set(numbers)
    life.check()


@pytest.mark.parametrize(
    "sequence", first_then_nightly([MERGED, CORRECTED]), ids=attrgetter("table")
)
def test_what_is_settled_is_published_whichever_sequence_a_crash_and_the_loss_of_the_lake_cut_short(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequence: Sequence
) -> None:
    """The sink's next message says that a lost lake reads on behind the late record."""
    life = CorrectedLife.begin(kafka, tmp_path)
    numbers = life.both(("a", 0), (None, 1000))
    life.run()
    numbers += life.send("tracking", ("a", 100))
    numbers += life.both(("b", 2000), (None, 3000))
    life.run("bronze")
    life.run("silver")

    pending = LakeSequence.pending

    def dying(its: LakeSequence, *arguments: Any) -> Any:
        if its.sequence is sequence:
            raise KilledError("before its messages")
        return pending(its, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(LakeSequence, "pending", dying)
        with pytest.raises(BaseException, match="before its messages"):
            life.run("gold")
    life.lose()
    life.run()
    life.end(numbers)


@pytest.mark.fault("jumps")
def test_a_lake_that_was_taken_up_jumps_only_once_it_knows_what_corrections_have(
    kafka: str, tmp_path: Path
) -> None:
    """The records of the sink's last message are read by then, and the late one is not."""
    life = CorrectedLife.begin(kafka, tmp_path)
    numbers = life.both(("a", 1000), (None, 1400))
    life.run()
    numbers += life.both((None, 2000))
    time.sleep(0.1)
    since = time_text(now_ms())
    numbers += life.correct(5000, ("l", 1500))
    life.lose()
    life.configure("merge.max_records_per_batch", 1)
    while clock_now(life) <= 1300:
        with killed_at("silver.done"):
            life.call("run", "--once", exit_code=1)
    said = life.call("reset", "--to", since, "--yes", exit_code=2)
    assert "records that are out are still to be read in partition 0" in said
    assert "until its clock has passed 1970-01-01T00:00:02.100Z, then jump" in said
    life.run()
    life.call("reset", "--to", since, "--yes")
    life.end(numbers)


@pytest.mark.nightly
def test_a_jump_back_counts_no_late_record_that_repeats_what_is_out(
    kafka: str, tmp_path: Path
) -> None:
    life = CorrectedLife.begin(kafka, tmp_path, sources__tracking__id="i")
    life.send("tracking", ("a", 0), i="x")
    life.both((None, 1000))
    life.run()
    life.send("tracking", ("a", 100), i="x")
    life.both((None, 1100))
    life.run()
    kinds = life.river.reader.select(tables.DUPLICATES, ["is_late"])["is_late"].to_pylist()
    assert kinds == [True]
    life.call("reset", "--to", "earliest", "--yes")
    life.both((None, 5000))
    life.run()
    assert life.corrections() == []
    assert len(messages_in(kafka, life.river.sink)) == 1
    life.check()


@pytest.mark.nightly
def test_a_jump_back_merges_nothing_again_that_a_correction_has(kafka: str, tmp_path: Path) -> None:
    """The merge record was too large, and is out as a correction alone."""
    life = CorrectedLife.begin(kafka, tmp_path, publish__max_bytes="1KiB")
    numbers = life.send("tracking", ("a", 0), pad="x" * 1500)
    life.both((None, 1000))
    life.run()
    life.evolve("publish.max_bytes", "8MiB")
    numbers += life.correct(1100, ("a", 100))
    assert [each.version.version for each in life.corrections()] == [1]
    life.call("reset", "--to", "earliest", "--yes")
    life.run()
    numbers += life.correct(5000, ("a", 50))
    assert life.consumed() == set(numbers)
    life.check()


@pytest.mark.nightly
def test_commands_know_the_corrections_of_a_lake_that_makes_none_any_more(
    kafka: str, tmp_path: Path
) -> None:
    life = CorrectedLife.begin(kafka, tmp_path, keep={"silver": "2d"})
    life.both(("a", 0), (None, 1000))
    life.run()
    life.correct(1100, ("a", 100))
    life.correct(1200, ("b", 200))
    life.evolve("publish.corrections", None)
    [record] = json.loads(life.call("explain", "a", "--json"))["records"]
    assert [version["published"]["seq"] for version in record["versions"]] == [0]
    held = json.loads(life.call("forget", "a", "--json"))["held"]
    assert (f"topic {life.topic}", 1) in {(row["where"], row["records"]) for row in held}
    life.both((None, 3 * DAY_MS))
    life.run()
    life.call("maintain")
    corrected = life.river.reader.select(tables.CORRECTIONS, ["merge_key"])["merge_key"]
    assert corrected.to_pylist() == ["b"], "the last one that is out stays"


def test_the_sink_never_runs_ahead_of_what_a_lost_lake_would_not_read_again(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = CorrectedLife.begin(kafka, tmp_path)
    numbers = life.both(("a", 0), (None, 1000))
    life.run()
    numbers += life.send("tracking", ("a", 100))
    numbers += life.both(("b", 2000), (None, 3000))
    life.run("bronze")

    pending = LakeSequence.pending
    seen = list[str]()

    def beside(its: LakeSequence, *arguments: Any) -> Any:
        seen.append(its.sequence.table)
        if its.sequence is MERGED and seen.count(its.sequence.table) == 1:
            life.run("silver")  # the corrections are done; silver's process commits now
        return pending(its, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(LakeSequence, "pending", beside)
        life.run("gold")
    assert seen == ["corrections", "silver"], "one pass"
    life.lose()
    life.run()
    life.end(numbers)
