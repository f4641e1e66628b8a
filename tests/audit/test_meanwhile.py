"""What commands answer while another one changes the lake between two of their questions: what the
lake was, or is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes import CrashError, dying_at
from tests.support.effort import first_then_nightly
from tests.support.meanwhile import Meanwhile
from tests.support.rivers import River
from watersmeet.ask.explain import explain
from watersmeet.ask.report import read_report
from watersmeet.ask.status import status
from watersmeet.audit.problems import SHOWN
from watersmeet.audit.rebuild import HistoryMovedError, rebuild, rebuilt_settings, verify_against
from watersmeet.audit.verify import verify
from watersmeet.engine.choice import open_engine
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.history import InKafka
from watersmeet.lake.identity import REBUILD_GENERATION, kept_facts
from watersmeet.lake.journal import CLOSED
from watersmeet.lake.lease import FORGET, Lease
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader
from watersmeet.operations.forget import Forgetting
from watersmeet.operations.retention import expire
from watersmeet.run import LAYERS
from watersmeet.running.beginnings import read_last_messages
from watersmeet.running.generations import Jump, Target
from watersmeet.running.owner import Owner
from watersmeet.settings import Settings
from watersmeet.silver import Silver

pytestmark = [pytest.mark.promise("A16"), pytest.mark.long, pytest.mark.fault("owners")]

KEEP = {"bronze": "600ms", "silver": "900ms", "late": "700ms"}
KEY, PARTITIONS, TOKEN = "a", 2, 10**6

Act = Callable[[Settings], object]


def owner(settings: Settings) -> Owner:
    """A process that has just taken the layers over."""
    return Owner(open_engine(settings), TOKEN)


def reader_of(settings: Settings) -> DeltaRsReader:
    return DeltaRsReader(Lake(settings))


def batch(settings: Settings) -> None:
    list(Silver(owner(settings), settings, PARTITIONS).drain())


def keep(settings: Settings) -> None:
    before = rows(settings, tables.bronze("orders"))
    for table in (*map(tables.bronze, settings.sources), tables.SILVER):
        expire(owner(settings), settings, table)
    assert rows(settings, tables.bronze("orders")) < before


def forget(settings: Settings) -> None:
    Forgetting(reader_of(settings), settings, KEY).erase(owner(settings))


ACTS: dict[str, Act] = {"a batch": batch, "keep": keep, "forget": forget}


def rows(settings: Settings, table: str) -> int:
    return int(reader_of(settings).summary(table, [], {"rows": ("count", "*")})["rows"][0].as_py())


@dataclass
class Scene:
    """A lake whose bronze is ahead of silver, to be copied: each copy may be changed."""

    river: River

    def copy(self, folder: Path) -> Settings:
        shutil.copytree(self.river.folder / "lake", folder / "lake")
        return self.river.settings.model_copy(update={"lake": str(folder / "lake")})


@pytest.fixture(scope="module")
def scene(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    river = River.make(
        kafka, tmp_path_factory.mktemp("meanwhile"), "meanwhile", partitions=PARTITIONS, keep=KEEP
    )
    for _ in range(3):
        river.flow(records=8)
        river.finish()
    river.flow(records=8)
    river.finish("bronze")
    return Scene(river)


def problems(reader: TableReader, settings: Settings) -> list[str]:
    found = verify(reader, settings, full=True)
    assert found["ok"] == (not found["problems"])
    return [
        f"{problem['where']}: {problem['what']}; {problem['fix']}" for problem in found["problems"]
    ]


def against(settings: Settings, folder: Path, reader: TableReader) -> list[str]:
    there = reader_of(rebuilt_settings(settings, folder))
    return [str(problem) for problem in verify_against(reader, there, settings, folder)["problems"]]


def shares(*quick: float) -> list[Any]:
    """Where among its questions a command is interrupted: in some places at every change, in all at
    night."""
    every = [each / 50 for each in range(51)]
    return [*quick, *(pytest.param(share, marks=pytest.mark.nightly) for share in every)]


def interrupted(
    settings: Settings, act: Act, share: float, ask: Callable[[TableReader], Any]
) -> Any:
    """An answer in the midst of which something happens, after this share of the questions that it
    takes."""
    quiet = Meanwhile(settings, list, 10**6)
    ask(quiet)
    reader = Meanwhile(settings, partial(act, settings), int((quiet.asked - 1) * share))
    answer = ask(reader)
    assert reader.has_acted
    return answer


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("share", shares(0.7))
def test_a_sound_lake_is_sound_whatever_happens_between_two_questions(
    scene: Scene, tmp_path: Path, name: str, share: float
) -> None:
    settings = scene.copy(tmp_path)
    assert interrupted(settings, ACTS[name], share, lambda reader: problems(reader, settings)) == []


def without_examples(answer: dict[str, object]) -> dict[str, object]:
    """Without warnings, which name any record of those that they are about as an example."""
    return {name: value for name, value in answer.items() if name != "warnings"}


@pytest.mark.parametrize("name", first_then_nightly(ACTS))
@pytest.mark.parametrize("share", [0.6, *shares()])
def test_status_explain_and_report_tell_of_one_moment(
    scene: Scene, tmp_path: Path, name: str, share: float
) -> None:
    """Their answers are those of before or those of after."""
    commands: dict[str, Callable[[Settings, TableReader], object]] = {
        "status": lambda settings, reader: without_examples(status(reader, settings)),
        "explain": lambda settings, reader: explain(reader, settings, KEY),
        "report": lambda settings, reader: repr(read_report(reader, settings, 0).sections),
    }
    for command, ask in commands.items():
        settings = scene.copy(tmp_path / command)
        before = ask(settings, reader_of(settings))
        answer = interrupted(settings, ACTS[name], share, partial(ask, settings))
        assert answer in (before, ask(settings, reader_of(settings))), command


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("keep", 1),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in [("keep", 0), ("forget", 1)]),
    ],
)
def test_a_rebuild_whose_history_moves_says_so(
    scene: Scene, tmp_path: Path, name: str, batches: int
) -> None:
    """Whether records go before its first batch is merged or after it; and it never counts as a
    rebuild."""
    settings, into = scene.copy(tmp_path), tmp_path / "again"
    small = settings.model_copy(
        update={"merge": settings.merge.model_copy(update={"max_records_per_batch": 40})}
    )
    left = [batches]

    def notify(_: object) -> None:
        if not left[0]:
            ACTS[name](settings)
        left[0] -= 1

    with pytest.raises(HistoryMovedError, match="rebuild again"):
        rebuild(reader_of(settings), small, into, notify=notify)
    kept = kept_facts(reader_of(rebuilt_settings(settings, into)))
    assert kept.keys() == {REBUILD_GENERATION}, "nothing else, above all not its last batch"
    again = rebuild(reader_of(settings), settings, tmp_path / "third")
    assert again["lake"] == again["rebuilt"]


@pytest.mark.parametrize("name", ["a batch", "keep"])
@pytest.mark.parametrize("share", [0.0, *shares(0.5)])
def test_a_rebuild_stays_the_same_as_the_lake(
    scene: Scene, tmp_path: Path, name: str, share: float
) -> None:
    """Also where rows end that it still has."""
    settings, into = scene.copy(tmp_path), tmp_path / "again"
    found = rebuild(reader_of(settings), settings, into)
    assert found["lake"] == found["rebuilt"]
    assert (
        interrupted(settings, ACTS[name], share, lambda asked: against(settings, into, asked)) == []
    )
    assert against(settings, into, reader_of(settings)) == []


# -- what a crash has left


def cut_short(
    settings: Settings, write: Callable[[Owner], object], operation: str, table: str
) -> None:
    with pytest.raises(CrashError):
        write(Owner(dying_at(open_engine(settings), operation, table), TOKEN))


def jump(settings: Settings, by: int) -> Callable[[Owner], object]:
    """A jump so many offsets further on, or back."""

    def write(owner: Owner) -> None:
        at = {
            tp: cursor.next_offset
            for tp, cursor in Silver(owner, settings, PARTITIONS).recover().state.cursors.items()
        }
        targets = {tp: Target(offset + by, InKafka("", 0, offset)) for tp, offset in at.items()}
        Jump(
            owner, settings, PARTITIONS, "a test", targets, read_last_messages(settings, PARTITIONS)
        ).commit()

    return write


CUT: list[tuple[str, Callable[[Settings], Callable[[Owner], object]], str, str]] = [
    *[
        ("a jump back", partial(jump, by=-6), operation, table)
        for operation, table in [
            ("update", tables.SILVER),
            ("decide", CLOSED),
        ]
    ],
    ("a jump forward", partial(jump, by=2), "decide", CLOSED),
]


@pytest.mark.fault("jumps", "kill")
@pytest.mark.parametrize(
    ("name", "command", "operation", "table"),
    first_then_nightly(CUT),
    ids=[f"{name}, {table}" for name, _, _, table in CUT],
)
def test_a_jump_whose_consequences_are_missing_breaks_no_promise(
    scene: Scene,
    tmp_path: Path,
    name: str,
    command: Callable[[Settings], Callable[[Owner], object]],
    operation: str,
    table: str,
) -> None:
    """Before the next start, and after it; and a rebuild is the same as the lake."""
    settings = scene.copy(tmp_path)
    cut_short(settings, command(settings), operation, table)
    found = verify(reader_of(settings), settings, full=True)
    assert found["problems"] == []
    assert any("the next start" in note for note in found["notes"])
    again = rebuild(reader_of(settings), settings, tmp_path / "again")
    assert again["lake"] == again["rebuilt"]
    assert against(settings, tmp_path / "again", reader_of(settings)) == []
    batch(settings)
    assert problems(reader_of(settings), settings) == []


@pytest.mark.parametrize("table", [tables.SILVER, tables.JOURNAL])
def test_a_jump_that_was_not_decided_leaves_nothing(
    scene: Scene, tmp_path: Path, table: str
) -> None:
    """What it remembers of messages before its commit counts for nothing, before the next start and
    after it."""
    settings = scene.copy(tmp_path)
    before = rows(settings, tables.PASSED)
    cut_short(settings, jump(settings, -6), "append", table)
    assert (rows(settings, tables.PASSED) > before) == (table == tables.JOURNAL)
    assert problems(reader_of(settings), settings) == []
    batch(settings)
    assert problems(reader_of(settings), settings) == []


ERASING = [
    ("update", tables.bronze("orders")),
    ("merge", tables.SILVER),
]


@pytest.mark.fault("kill")
@pytest.mark.parametrize(("operation", "table"), ERASING, ids=[table for _, table in ERASING])
def test_a_key_that_is_half_erased_is_named_with_what_to_do(
    scene: Scene, tmp_path: Path, operation: str, table: str
) -> None:
    settings = scene.copy(tmp_path)
    cut_short(settings, Forgetting(reader_of(settings), settings, KEY).erase, operation, table)
    found = verify(reader_of(settings), settings, full=True)["problems"]
    assert found
    for problem in found[:SHOWN]:
        assert problem["what"].startswith("`forget` was cut short")
        assert "'a'" in problem["where"]
        assert problem["fix"] == "call `watersmeet forget` for the key again"
    assert all("more problems like these" in problem["what"] for problem in found[SHOWN:])
    forget(settings)
    assert problems(reader_of(settings), settings) == []


def test_while_a_key_is_being_erased_the_lake_is_looked_at_again(
    scene: Scene, tmp_path: Path
) -> None:
    """`forget` is at work when the lake is looked at, and does the rest after that."""
    settings = scene.copy(tmp_path)
    cut_short(
        settings, Forgetting(reader_of(settings), settings, KEY).erase, "merge", tables.SILVER
    )
    one_look = Meanwhile(settings, list, 10**6)
    assert problems(one_look, settings) != []
    engine = open_engine(settings)
    lease = Lease(engine.lake, engine.reader, engine.append, LAYERS, FORGET)
    lease.take()
    reader = Meanwhile(settings, partial(forget, settings), one_look.asked + 1)
    assert problems(reader, settings) == []
    assert reader.has_acted
    lease.release()
