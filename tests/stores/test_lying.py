"""An object store that lies within what real stores do: the result is exact, or a run says in one
sentence why it ends, and the next one goes on. (`python -m tests.faults.stored` does it for
longer.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.stored import run_on
from tests.stores.conftest import MakeRiver
from tests.support import effort
from tests.support.lying_store import lying_store
from tests.support.rivers import River
from tests.support.stores import Store
from watersmeet.engine.choice import open_engine
from watersmeet.errors import StoreBehindError, StoreUnreachableError
from watersmeet.lake import by_delta_rs, tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.commits import Commit, last_commit
from watersmeet.lake.location import Lake
from watersmeet.lake.store import check_writable

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.promise("A12")]

EVERY_SECOND = " ".join(f"list:{number}=short" for number in range(1, 200, 2))
FOR_EVER = "list:1=short:100000"
COMMITS = 5
UNSEEN = "leases was listed without its last commit"


@pytest.mark.fault("store", oracle=True)
@pytest.mark.parametrize("seed", effort.first_then_nightly(range(8)))
def test_runs_on_a_store_that_lies_end_exactly(
    kafka: str, store: Store, tmp_path: Path, seed: int
) -> None:
    problems, happened = run_on(kafka, store, tmp_path, seed, runs=3 if effort.SEED else 1)
    assert problems == [], happened


@contextmanager
def lying(river: River, store: Store, lies: str) -> Iterator[Lake]:
    """The lake of a river, by a store with these lies."""
    with lying_store(store.endpoint, lies) as told:
        river.config["storage"] = store.storage() | {"AWS_ENDPOINT_URL": told.endpoint}
        river.write()
        yield Lake(river.settings)


@pytest.fixture
def committed(on_s3: MakeRiver, request: pytest.FixtureRequest) -> River:
    """A lake that has one table, with some commits."""
    river = on_s3(request.node.name.replace("_", "-"))
    engine = open_engine(river.settings)
    layout = engine.lake.layout[tables.LEASES]
    engine.create(layout)
    for number in range(1, COMMITS):
        engine.append(layout.name, layout.schema.empty_table(), Commit("test", 1, number))
    return river


@pytest.mark.fault("store")
def test_what_a_list_of_the_log_lacks_is_read_all_the_same(committed: River, store: Store) -> None:
    for limit in (1, 3, None):
        with lying(committed, store, EVERY_SECOND) as lake:
            reader = DeltaRsReader(lake)
            for _ in range(3):
                found = [
                    (version.number, commit.number)
                    for version in reader.history(tables.LEASES, limit)
                    if (commit := Commit.parse(version.metadata)) is not None
                ]
                numbers = range(COMMITS - 1, 0, -1)[:limit]
                assert found == [(number, number) for number in numbers]
                assert reader.version(tables.LEASES) == COMMITS - 1


@pytest.mark.fault("store")
def test_a_commit_that_no_list_has_is_waited_for_and_then_said(
    committed: River, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_delta_rs, "_WAITS_S", (0.0, 0.1))
    with lying(committed, store, FOR_EVER) as lake, pytest.raises(StoreBehindError, match=UNSEEN):
        DeltaRsReader(lake).version(tables.LEASES)
    with lying(committed, store, "list:2=short:100000") as lake:
        reader = DeltaRsReader(lake)
        assert reader.version(tables.LEASES) == COMMITS - 1
        with pytest.raises(StoreBehindError, match=UNSEEN):
            last_commit(reader, tables.LEASES, "test")


@pytest.mark.fault("store")
def test_a_table_that_no_list_has_exists(on_s3: MakeRiver, store: Store) -> None:
    river = on_s3("new")
    engine = open_engine(river.settings)
    engine.create(engine.lake.layout[tables.LEASES])
    with lying(river, store, FOR_EVER) as lake:
        assert DeltaRsReader(lake).exists(tables.LEASES)
        assert not DeltaRsReader(lake).exists(tables.JOURNAL)


@pytest.mark.fault("store")
@pytest.mark.parametrize("number", effort.first_then_nightly([1, 2, 3, 4]))
@pytest.mark.parametrize("kind", ["lost", "done-503"])
def test_a_store_whose_answer_is_lost_is_not_said_to_lack_conditional_puts(
    on_s3: MakeRiver, store: Store, number: int, kind: str
) -> None:
    with lying(on_s3(f"probe-{kind}-{number}"), store, f"put:{number}={kind}") as lake:
        check_writable(lake)


@pytest.mark.fault("store")
def test_a_list_that_breaks_off_is_said_to_be_the_stores(committed: River, store: Store) -> None:
    told = pytest.raises(StoreUnreachableError, match="broke off an answer about leases")
    with lying(committed, store, "list:1=half:100000") as lake, told:
        DeltaRsReader(lake).version(tables.LEASES)
