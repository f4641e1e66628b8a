"""`verify` on a lake with tenants, corrections, ids, two epochs and a jump: it finds each row that
is missing, there twice, or changed, of whatever kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.audit.inputs import problems_in
from tests.audit.test_verify import Change, altered, gone, twice
from tests.laws.test_corrections import corrections
from tests.laws.test_idle import Clock, Quiet
from tests.support.cases import cases_with_ids
from tests.support.configurations import IDS, settings_for
from tests.support.effort import first_then_nightly
from tests.support.lakes import CaseLake
from tests.support.model_lakes import Row, rewrite
from tests.support.tenants import merge_of, tenant_cases
from watersmeet.core.sequence import MERGED, Tail
from watersmeet.engine.choice import open_engine
from watersmeet.lake import tables
from watersmeet.lake.identity import begin_epoch

pytestmark = [pytest.mark.promise("A1"), pytest.mark.long, pytest.mark.fault("damage")]

RULES = [(100, 250, 300), (60, 200, 500)]
BOUNDS = {"max_parts": 3}
PARTITIONS = 3


@dataclass
class Sound:
    """A lake, its silver as it is right, and by status its rows of the newest generation."""

    lake: CaseLake
    silver: pa.Table
    rows: dict[str, list[Row]]

    def restore(self) -> None:
        """Silver is right again."""
        settings = self.lake.settings
        write_deltalake(f"{settings.lake}/{tables.SILVER}", self.silver, mode="overwrite")

    def found(self) -> list[str]:
        """What `verify --full` says of the newest generation."""
        return problems_in(self.lake)

    def damage(self, which: Row, change: Change) -> None:
        """One row of silver is changed."""
        left = [which]

        def changed(row: Row) -> Row | list[Row] | None:
            if left != [row]:
                return row
            left.clear()
            return change(row)

        rewrite(self.lake.settings, tables.SILVER, changed)
        assert not left


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    rules = IDS | corrections(max_versions=1)
    folder = tmp_path_factory.mktemp("damages")
    settings = settings_for(folder, engine="embedded", merge=merge_of(RULES[0]) | BOUNDS, **rules)
    lake = CaseLake(open_engine(settings), settings, cases_with_ids(tenant_cases(PARTITIONS)))
    begin_epoch(lake.reader, lake.engine.append, settings, 0)
    for share in (0.3, 0.5):
        lake.arrive(share)
        lake.merge()
    tails = dict(last_out(lake))
    cursors = lake.start().recover().state.cursors.items()
    lake.jump({tp: max(0, at.next_offset - 12) for tp, at in cursors}, tails)
    clock = Clock()
    silence = Quiet(settings, 10_000, now_s=clock)
    for number, share in enumerate((0.6, 0.7, 0.8, 0.9, 1.0)):
        if number == 2:
            after = settings_for(folder, merge=merge_of(RULES[1]) | BOUNDS)
            lake.settings = lake.settings.model_copy(update={"merge": after.merge})
            begin_epoch(lake.reader, lake.engine.append, lake.settings, lake.plans[-1].batch + 1)
        lake.arrive(share)
        lake.merge()
        clock.now += 10
        list(lake.start(silence).drain())
    silver = lake.reader.rows(tables.SILVER, lake.engine.lake.schema(tables.SILVER).names)
    rows: dict[str, list[Row]] = {}

    def noted(row: Row) -> Row:
        if row["generation"] == 1:
            has_parts = row["tracking"] or row["orders"]
            is_too_large = row["status"] in ("open", "timed_out") and not has_parts
            rows.setdefault("too large" if is_too_large else row["status"], []).append(row)
        return row

    rewrite(lake.settings, tables.SILVER, noted)
    return Sound(lake, silver, rows)


def last_out(lake: CaseLake) -> Iterator[tuple[int, Tail]]:
    """By partition the last message, as if half of what has one were out."""
    names = ["partition", "event_time", *MERGED.order]
    where = [[("status", "=", "timed_out"), ("valid", "=", True)]]
    rows = lake.reader.select(tables.SILVER, [*dict.fromkeys(names)], where).to_pylist()
    for p in range(PARTITIONS):
        ours = sorted((r for r in rows if r["partition"] == p), key=MERGED.place)
        if ours:
            seq = len(ours) // 2
            yield p, Tail(seq, MERGED.place(ours[seq]), None, ours[seq]["event_time"])


def later(name: str) -> Change:
    return altered(**{name: lambda row: row[name] + 1})


def another(name: str) -> Change:
    return altered(**{name: lambda row: f"{row[name]}?"})


def with_parts(change: Callable[[list[Row]], list[Row]]) -> Change:
    """The parts of the source that has some are others."""

    def changed(row: Row) -> Row:
        source = "tracking" if row["tracking"] else "orders"
        return {**row, source: change(row[source])}

    return changed


PLACE = ("partition", "event_time", "tenant", "merge_key")
SIZES = ("record_bytes", "record_count")
COLUMNS = {
    "open": (*PLACE, "last_event_time", "due", *SIZES),
    "waiting": (*PLACE, "position", *SIZES),
    "timed_out": (*PLACE, "last_event_time", "due", "closed_at", "batch", *SIZES),
    "too large": (*PLACE, "last_event_time", "due", "closed_at", "batch", *SIZES),
    "excess": (*PLACE, "source", "topic", "offset"),
    "late": (*PLACE, "source", "topic", "offset", "position", "u", "id", "batch", SIZES[0]),
    "duplicate": (*PLACE, "source", "topic", "offset", "id", "of_offset"),
    "passed": (*PLACE, "source", "topic", "offset", "position", "batch"),
    "correction": (
        *(*PLACE, "source", "topic", "offset", "position", "u", "settled_at", "due", "closed_at"),
        *("first_event_time", "last_event_time", "version", "batch", *SIZES),
    ),
    "batch": (
        *("batch", "partition", "source", "topic", "from_offset", "until_offset", "head", "clock"),
        *("position", "epoch", "generation"),
    ),
    "idle": (*("partition", "source", "topic", "after_offset", "generation"),),
    "out": ("partition", "source", "topic", "from_offset", "generation"),
}
"""By status, the columns in which a row cannot have another value."""

SHARES = 12
"""Each submission tries a twelfth of the damages: one takes a whole `verify --full`."""

PARTS = ("open", "waiting", "timed_out", "correction")


def damages() -> Iterator[tuple[str, str, Change]]:
    """Yield a status, what is done to a row of it, and that."""
    for status, columns in COLUMNS.items():
        yield status, "is missing", gone
        if status != "out":
            yield status, "is there twice", twice
        for name in columns:
            is_text = name in ("tenant", "merge_key", "source", "topic", "id")
            yield status, f"has another {name}", another(name) if is_text else later(name)
    for status in PARTS:
        yield status, "lacks a part", with_parts(lambda parts: parts[1:])
        yield status, "has a part twice", with_parts(lambda parts: [*parts, parts[0]])
    for status in ("timed_out", "correction"):
        yield status, "is not valid", altered(valid=False, invalid_reason="predicate")
    yield "correction", "has another has_message", altered(has_message=False)
    yield "correction", "is late-born", altered(is_late_born=lambda row: not row["is_late_born"])
    for status in ("late", "duplicate", "passed", "timed_out"):
        yield status, "is of the batch before", altered(batch=lambda row: row["batch"] - 1)
        yield status, "is of a batch that never was", altered(batch=99)
        yield status, "is of another generation", altered(generation=7)
    yield "excess", "is of a batch that never was", altered(batch=99)
    yield "excess", "is late", altered(status="late", value=b"{}")
    yield "too large", "is valid", altered(valid=True, invalid_reason=None)
    yield "too large", "has another reason", altered(invalid_reason="predicate")
    yield "late", "has another value", altered(value=b"{}")
    yield "late", "passed", altered(status="passed", value=None, u=None)
    yield "passed", "is late", altered(status="late", value=b"{}")
    yield "open", "waits", altered(status="waiting")


def test_a_sound_lake_has_rows_of_every_kind_and_no_problem(sound: Sound) -> None:
    sound.restore()
    assert [*problems_in(sound.lake, generation=0), *sound.found()] == []
    assert sound.rows.keys() == COLUMNS.keys()
    assert {row["version"] for row in sound.rows["correction"]} == {0, 1}
    assert {row["is_late"] for row in sound.rows["duplicate"]} == {True, False}


def chosen(rows: list[Row]) -> Row:
    """A row in the middle with no value missing that others have."""
    complete = max(sum(value is not None for value in row.values()) for row in rows)
    ours = [row for row in rows if sum(v is not None for v in row.values()) == complete]
    return ours[len(ours) // 2]


@pytest.mark.parametrize("share", first_then_nightly(range(SHARES)))
def test_each_row_that_is_not_right_is_found(sound: Sound, share: int) -> None:
    unseen = []
    every = list(damages())[share::SHARES]
    for status, what, change in every:
        sound.restore()
        sound.damage(chosen(sound.rows[status]), change)
        if not sound.found():
            unseen.append(f"{status} {what}")
    assert unseen == []
    assert len(every) > 10


def test_a_part_that_is_in_two_rows_is_found(sound: Sound) -> None:
    sound.restore()
    rows = [row for row in sound.rows["timed_out"] if row["tracking"]]
    one = rows[0]
    other = next(row for row in rows[1:] if row["partition"] == one["partition"])
    sound.damage(other, altered(tracking=[*one["tracking"], *other["tracking"]]))
    assert any("appears 2 times" in problem for problem in sound.found())
