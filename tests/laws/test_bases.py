"""Saved states: what is derived from one is exactly what silver has, also corrections and late
duplicates; one that is lost is noticed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.laws.conftest import QUICK, MakeLake, in_folders
from tests.laws.test_retention import (
    PARTITIONS,
    TIMEOUT_MS,
    broken,
    is_derived_again,
    let_go,
    long_case,
    note_published,
)
from tests.laws.test_tenants import with_rules
from tests.support.cases import Case
from tests.support.configurations import IDS
from tests.support.crashes import CrashError, dying_at
from tests.support.effort import first_then_nightly, seeds
from tests.support.lakes import CaseLake
from tests.support.tenants import Window, merge_of, tenant_case
from watersmeet.ask.explain import explain
from watersmeet.audit.verify import lost_bases
from watersmeet.core.sequence import CORRECTED, MERGED
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.history import History, read_history
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.progress import last_batch
from watersmeet.lake.published import last_tails
from watersmeet.lake.restored import check_not_behind
from watersmeet.operations.forget import Forgetting
from watersmeet.operations.retention import expire

pytestmark = [
    pytest.mark.promise("C10"),
    pytest.mark.usefixtures("kind"),
    pytest.mark.fault("cuts", "retention"),
]

KEEP = {"bronze": "600ms", "silver": "900ms", "late": "900ms"}
CORRECTIONS = {"publish__corrections": {"topic": "merged-corrections", "within": "300ms"}}
SMALL = {"max_parts": 4}
"""So few that some merge records are too large."""

quickly = pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")


@pytest.fixture
def lake(new_lake: MakeLake) -> CaseLake:
    cases = {p: long_case(100 + p) for p in range(PARTITIONS)}
    merge = {"timeout": f"{TIMEOUT_MS}ms", **SMALL}
    return new_lake(cases, keep=KEEP, merge=merge, **CORRECTIONS, **IDS)


def history(lake: CaseLake) -> History:
    return read_history(lake.reader, lake.settings)


def history_batch(lake: CaseLake) -> int:
    first = history(lake).first_base
    return -1 if first is None else first.batch


def live(lake: CaseLake, kind: str = QUICK) -> None:
    """What is old is let go for a while, and then the lake flows on."""
    for share in (0.2, 0.4, 0.6, 0.8, 1):
        lake.arrive(share)
        lake.merge(lake.engine if share == 1 else lake.quick)
        note_published(lake)
        if share == 0.6 or (kind == QUICK and share < 0.6):
            let_go(lake)
        assert broken(lake) == []
    assert 0 < history_batch(lake) < history(lake).bases[-1].batch


def corrects_before(lake: CaseLake) -> int:
    """How many corrections from history are of merge records that had closed before it."""
    at = history_batch(lake)
    names = ["partition", "tenant", "merge_key", "event_time"]
    rows = lake.reader.select(
        tables.SILVER, names, [[("status", "=", "timed_out"), ("batch", "<=", at)]]
    )
    closed = {tuple(row.values()) for row in rows.to_pylist()}
    where = [[("batch", ">", at), ("is_late_born", "=", False)]]
    made = lake.reader.select(tables.CORRECTIONS, names, where).to_pylist()
    return sum(tuple(row.values()) in closed for row in made)


@in_folders
def test_corrections_and_late_duplicates_are_derived_from_a_base_exactly(
    lake: CaseLake, kind: str, tmp_path: Path
) -> None:
    live(lake, kind)
    after = [("batch", ">", history_batch(lake))]
    assert corrects_before(lake) > 0
    late = [[*after, ("is_late", "=", True)]]
    assert lake.reader.select(tables.DUPLICATES, ["offset"], late).num_rows
    assert lake.reader.select(tables.EXCESS, ["offset"], [after]).num_rows
    assert is_derived_again(lake, tmp_path)


@pytest.mark.long
@quickly
@pytest.mark.parametrize("seed", first_then_nightly(seeds(2)))
@pytest.mark.parametrize("name", ["timeouts", "tenants"])
def test_what_is_left_is_judged_and_derived_again_whatever_came(
    new_lake: MakeLake, tmp_path: Path, name: str, seed: int
) -> None:
    """Random input, cuts and rules, through epochs."""
    rng = random.Random(seed)
    cases: dict[int, Case]
    windows: list[Window] = [(100, 150, 100), (30, 90, 100), (30, 90, 30), (80, None, 200)]
    if name == "tenants":
        cases = {p: tenant_case(10 * seed + p, lengths=[150, 250]) for p in range(2)}
    else:
        cases = {p: long_case(10 * seed + p, rng.choice([10, 20, 40])) for p in range(2)}
        windows = [(gap_ms, None, None) for gap_ms, *_ in windows]
    keep = {"bronze": f"{rng.choice([400, 900])}ms", "silver": "1800ms", "late": "1800ms"}
    merge = {**merge_of(windows[0]), **SMALL}
    lake = new_lake(cases, keep=keep, merge=merge, **CORRECTIONS, **IDS)
    begin_epoch(lake.reader, lake.quick.append, lake.settings, 0)
    judged = 0
    for share in [*sorted(rng.random() for _ in range(8)), 1.0]:
        lake.arrive(share)
        lake.merge()
        note_published(lake)
        let_go(lake)
        assert broken(lake) == []
        judged += history_batch(lake) > 0
        last = last_batch(lake.reader)
        if last is not None and rng.random() < 0.4:
            lake.settings = with_rules(lake.settings, rng.choice(windows))
            begin_epoch(lake.reader, lake.quick.append, lake.settings, last.batch + 1)
    assert judged
    assert is_derived_again(lake, tmp_path)


DAMAGES = {
    "a correction": ("correction", "version > 0", {"settled_at": "settled_at + INTERVAL '1 day'"}),
    "what a correction has": ("correction", "version > 0", {"record_ids": "NULL"}),
    "a late duplicate": ("duplicate", "is_late", {"of_offset": "of_offset + 1"}),
    "ids": ("timed_out", "true", {"record_ids": "NULL"}),
    "has_message": ("correction", "has_message", {"has_message": "false"}),
}


@quickly
def test_what_is_damaged_after_a_base_is_found(lake: CaseLake) -> None:
    live(lake)
    path = lake.reader.path(tables.SILVER)  # type: ignore[attr-defined]
    for what, (status, condition, values) in DAMAGES.items():
        silver = DeltaTable(path)
        version = silver.version()
        is_it = f"status = '{status}' AND batch > {history_batch(lake)} AND {condition}"
        assert silver.update(values, predicate=is_it)["num_updated_rows"] > 0, what
        assert broken(lake), what
        silver.restore(version)
    assert broken(lake) == []


def copied(lake: CaseLake, name: str, folder: Path) -> Callable[[], None]:
    """Copy a table, and return what puts the copy in its place."""
    path = Path(lake.reader.path(name))  # type: ignore[attr-defined]
    shutil.copytree(path, folder / name)

    def put_back() -> None:
        shutil.rmtree(path)
        shutil.copytree(folder / name, path)

    return put_back


@quickly
def test_an_earlier_copy_of_the_saved_states_is_noticed(lake: CaseLake, tmp_path: Path) -> None:
    lake.arrive(0.5)
    lake.merge()
    note_published(lake)
    let_go(lake)
    put_back = copied(lake, tables.BASES, tmp_path)
    lake.arrive()
    lake.merge()
    note_published(lake)
    check_not_behind(lake.reader, lake.settings)
    assert lost_bases(lake.reader, history(lake)).problems == []
    put_back()
    with pytest.raises(ConfigurationError, match=r"bases has 0 of the .* an earlier copy of it"):
        check_not_behind(lake.reader, lake.settings)
    [problem] = lost_bases(lake.reader, history(lake)).problems
    assert problem.where == tables.BASES


@quickly
def test_a_base_that_lacks_a_row_is_not_read(lake: CaseLake) -> None:
    live(lake)
    bases = DeltaTable(lake.reader.path(tables.BASES))  # type: ignore[attr-defined]
    bases.delete(f"status = 'open' AND _base = {history(lake).bases[0].number}")
    with pytest.raises(ConfigurationError, match="or rows were deleted"):
        broken(lake)


@quickly
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", [("append", tables.BASES), ("decide", "base")])
def test_a_crash_while_a_state_is_saved_leaves_a_lake_that_goes_on(
    lake: CaseLake, step: tuple[str, str], after: bool
) -> None:
    lake.arrive(0.4)
    lake.merge()
    before = len(history(lake).bases)
    lake.arrive(0.6)
    with pytest.raises(CrashError):
        lake.merge(dying_at(lake.engine, *step, after=after))
    assert len(history(lake).bases) == before + (step[0] == "decide" and after)
    check_not_behind(lake.reader, lake.settings)
    lake.arrive()
    lake.merge()
    note_published(lake)
    let_go(lake)
    assert broken(lake) == []
    expire(lake.owner(), lake.settings, tables.BASES)
    rows = lake.reader.select(tables.BASES, ["_base"])["_base"].to_pylist()
    assert {*rows} == {base.number for base in history(lake).bases}, "others are removed"
    assert broken(lake) == []


@quickly
def test_a_key_is_forgotten_in_saved_states_and_the_journal_says_so(lake: CaseLake) -> None:
    live(lake)
    let_go(lake)
    before = sum(base.rows for base in history(lake).bases)
    with pytest.raises(CrashError):
        Forgetting(lake.reader, lake.settings, "a").erase(
            lake.owner(dying_at(lake.engine, "merge", tables.BASES))
        )
    check_not_behind(lake.reader, lake.settings)
    half = Forgetting(lake.reader, lake.settings, "a")
    assert not half.preview()["tables"][0]["before"]
    assert half.is_there, "or the next call would take the key for unknown"
    for _ in range(2):
        Forgetting(lake.reader, lake.settings, "a").erase(lake.owner())
        assert not Forgetting(lake.reader, lake.settings, "a").is_there
        check_not_behind(lake.reader, lake.settings)
        expire(lake.owner(), lake.settings, tables.BASES)
        left = lake.reader.select(tables.BASES, ["_base"]).num_rows
        assert sum(base.rows for base in history(lake).bases) == left < before
    assert broken(lake) == []


@quickly
def test_explain_begins_at_the_nearest_base(new_lake: MakeLake) -> None:
    """Of what came after it, it knows what it knew before anything was deleted."""
    cases = {p: tenant_case(60 + p, lengths=[200]) for p in range(PARTITIONS)}
    keep = {"bronze": "800ms", "silver": "1200ms", "late": "1s"}
    merge = merge_of((100, 250, 300))
    lake = new_lake(cases, keep=keep, merge=merge, publish__valid="false")  # nothing waits for gold
    for share in (0.2, 0.4, 0.6, 0.8, 1):
        lake.arrive(share)
        lake.merge()
    known = positions(lake)
    let_go(lake)
    at = history_batch(lake)
    assert at > 0
    left = {part: position for part, position in positions(lake).items() if part[0] > at}
    assert left == {part: position for part, position in known.items() if part[0] > at}
    assert None not in left.values()


def positions(lake: CaseLake) -> dict[tuple[Any, ...], int | None]:
    """What `explain` says of parts: by batch, source, partition and offset, their positions."""
    return {
        (part["batch"], part["source"], part["partition"], part["offset"]): part["position"]
        for key in "ab"
        for record in explain(lake.reader, lake.settings, key)["records"]
        for part in record["parts"]
    }


@quickly
def test_generations_that_keep_has_cut_are_not_judged(lake: CaseLake) -> None:
    lake.arrive(0.4)
    lake.merge()
    note_published(lake)
    begin = {tp: at.next_offset for tp, at in lake.start().recover().state.cursors.items()}
    tails, corrected = (last_tails(lake.engine.reader, each) for each in (MERGED, CORRECTED))
    lake.jump(begin, tails, correction_tails=corrected)
    lake.merge()
    lake.arrive()
    lake.merge()
    note_published(lake)
    let_go(lake)
    first = history(lake).first_base
    assert first is not None
    assert first.generation == 1
    assert broken(lake) == []
    with pytest.raises(ConfigurationError, match="generation 0 cannot be judged"):
        broken(lake, generation=0)
