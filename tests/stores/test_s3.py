"""A lake in an object store, on the embedded engine: all that holds for a folder holds there, and
trouble is told at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stores.conftest import MakeRiver
from tests.support.commands import every_command_does_its_work, without_java
from tests.support.owners import assert_changes_nothing, assert_refused
from tests.support.rewrites import PROGRAM, rewrites_of
from tests.support.rivers import Losses, River, until
from tests.support.stores import READER, SECRET, Store
from watersmeet.engine.choice import open_engine
from watersmeet.errors import StoreAccessError, TableConflictError
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit, last_commit
from watersmeet.lake.files import Files

pytestmark = pytest.mark.long

WRITERS = 8


@pytest.mark.nightly
def test_every_command_does_its_work_on_s3(on_s3: MakeRiver) -> None:
    every_command_does_its_work(on_s3("s3"))


@pytest.mark.promise("A12")
@pytest.mark.fault("commits")
def test_of_many_writers_of_one_commit_one_succeeds(on_s3: MakeRiver) -> None:
    """The store refuses the second file of a name: so there is one owner of a token, and one batch
    of a number."""
    settings = on_s3("race").settings
    engine = open_engine(settings)
    layout = engine.lake.layout[tables.LEASES]
    engine.create(layout)

    def write(writer: int) -> bool:
        own = open_engine(settings)
        entry = {
            "entry": 1,
            "layer": "silver",
            "token": 1,
            "event": "taken",
            "holder": str(writer),
            "host": "here",
        }
        rows = layout.rows_of([{**entry, "pid": writer, "at": 0}])
        try:
            own.append(tables.LEASES, rows, Commit("test", 1, 1, {"writer": writer}))
        except TableConflictError:
            return False
        told = last_commit(own.reader, tables.LEASES, "test")
        return told is not None and told[1].facts == {"writer": writer}

    with ThreadPoolExecutor(WRITERS) as pool:
        assert sum(pool.map(write, range(WRITERS))) == 1
    assert engine.reader.select(tables.LEASES, ["holder"]).num_rows == 1


@pytest.mark.nightly
def test_a_second_run_is_refused_and_a_woken_merge_changes_nothing(on_s3: MakeRiver) -> None:
    river = on_s3("owners", partitions=1)
    river.flow()
    first = river.run("--once", point="silver.merge")
    first.await_held()
    assert_refused(river)

    first.pause()
    river.flow()
    river.finish()
    assert_changes_nothing(river, first)
    assert river.losses() == Losses()


@pytest.mark.nightly
@pytest.mark.promise("A12")
@pytest.mark.fault("kill", oracle=True)
def test_kills_between_the_commits_lose_and_repeat_nothing(on_s3: MakeRiver) -> None:
    river = on_s3("kills")
    for point in ("bronze.done", "silver.merge", "silver.done", "gold.note"):
        river.flow()
        river.kill_at(point, "--once")
    river.finish()
    assert river.losses() == Losses()


@pytest.mark.nightly
@pytest.mark.promise("C24")
@pytest.mark.fault("kill", "memory", oracle=True)
def test_the_same_holds_of_batches_that_write_the_open_records_anew(on_s3: MakeRiver) -> None:
    river = on_s3("rewrites")
    river.program = PROGRAM
    for point in ("silver.merge", "silver.done"):
        river.flow()
        river.kill_at(point, "--once")
    river.flow()
    river.finish()
    assert rewrites_of(river.settings) > 3
    assert river.losses() == Losses()
    assert river.broken_promises() == []


@pytest.mark.nightly
@pytest.mark.promise("A12")
@pytest.mark.fault("outage", oracle=True)
def test_a_run_outlives_a_store_that_is_away(on_s3: MakeRiver, store: Store) -> None:
    river = on_s3("away")
    river.flow()
    run = river.run()
    try:
        until(lambda: "published to" in run.said(), "messages before the store goes away")
        store.kill()
        try:
            river.flow()
            about_store = "store: the object store of"
            until(
                lambda: run.process.poll() is not None or about_store in run.said(),
                "a word about the store",
            )
            assert about_store in run.said()
            river.flow()
        finally:
            store.start()
        river.flow()
        until(
            lambda: run.process.poll() is not None or is_complete(river),
            "everything merged and published",
        )
        assert run.stop() == 0, run.said()
    finally:
        run.kill()
    assert "store: answers again" in run.said()
    assert "Traceback" not in run.said()
    assert river.losses() == Losses()
    assert river.broken_promises() == []


def is_complete(river: River) -> bool:
    return river.losses() == Losses()


@pytest.mark.nightly
def test_a_user_who_may_only_read_reads_and_is_refused_in_one_sentence_else(
    on_s3: MakeRiver, store: Store
) -> None:
    river = on_s3("reader")
    river.flow()
    river.finish()
    river.config["storage"] = store.storage(READER)
    river.write()
    for command in ("status", "verify --full"):
        assert without_java(river, *command.split(" "))
    refused = "the object store refuses writing at s3://shop/lakes/reader: "
    assert_one_sentence(without_java(river, "run", "--once", exit_code=1), refused)
    [problem] = json.loads(without_java(river, "validate", "--json", exit_code=2))["problems"]
    assert refused in f"{problem['what']}: "


def test_what_is_wrong_with_a_store_is_one_sentence(on_s3: MakeRiver, store: Store) -> None:
    river = on_s3("wrong")

    def assert_told(
        command: str, exit_code: int, part: str, lake: str = "s3://shop/lake", **options: str
    ) -> None:
        river.config |= {"lake": lake, "storage": store.storage() | options}
        river.write()
        assert_one_sentence(without_java(river, *command.split(" "), exit_code=exit_code), part)

    for command, doing in (("run --once", "writing"), ("status", "reading")):
        assert_told(
            command,
            1,
            f"the object store refuses {doing} at s3://shop/lake:",
            AWS_SECRET_ACCESS_KEY="wrong",
        )
    assert_told(
        "run --once",
        1,
        "the object store refuses writing at s3://shop/lake:",
        AWS_ACCESS_KEY_ID="nobody",
    )
    away = "the object store of s3://shop/lake does not answer;"
    assert_told("run --once", 1, away, AWS_ENDPOINT_URL="http://127.0.0.1:1")
    for command in ("run --once", "status"):
        assert_told(
            command,
            2,
            "there is no bucket or container `no-such-bucket`",
            lake="s3://no-such-bucket/lake",
        )
    assert_told(
        "run --once", 2, "lets two writers make the same file", AWS_CONDITIONAL_PUT="disabled"
    )


@pytest.mark.parametrize("spelling", ["AWS_{}", "aws_{}", "{}"])
def test_options_mean_to_files_what_they_mean_to_tables(spelling: str, store: Store) -> None:
    """In any spelling that delta-rs takes, and beside those that only it knows."""
    options = {
        spelling.format(name.removeprefix("AWS_")): value for name, value in store.storage().items()
    }
    own = {"AWS_S3_ALLOW_UNSAFE_RENAME": "true", "max_retries": "1", "timeout": "10s"}
    assert_usable(
        Files(
            {name.lower() if spelling.islower() else name: value for name, value in options.items()}
            | own
        )
    )


def test_what_the_options_do_not_say_the_environment_does(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.storage().items():
        monkeypatch.setenv(name, value)
    assert_usable(Files({}))
    with pytest.raises(StoreAccessError, match="refuses writing at s3://shop/files"):
        Files(store.storage(READER)).write_text("s3://shop/files/a", "b")


def assert_usable(files: Files) -> None:
    folder = "s3://shop/files/it's a `folder` é"
    assert files.read_text(f"{folder}/a/b") is None
    files.delete(f"{folder}/a/b")
    for text in ("one", "", "é\nmore"):
        files.write_text(f"{folder}/a/b", text)
        assert files.read_text(f"{folder}/a/b") == text
    assert files.exists(f"{folder}/a")
    assert not files.create(f"{folder}/a/b")
    files.delete(f"{folder}/a")
    assert not files.exists(f"{folder}/a")
    assert files.create(f"{folder}/a/b")
    files.delete(folder)


def assert_one_sentence(told: str, part: str) -> None:
    last = told.strip().splitlines()[-1]
    assert last.startswith("watersmeet: "), told
    assert part in last
    assert "Traceback" not in told
    assert SECRET not in told
