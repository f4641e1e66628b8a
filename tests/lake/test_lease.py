"""One owner for each layer at a time. Time is moved; nobody waits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from deltalake.exceptions import CommitFailedError

from pipelines.errors import LeaseLostError, LeaseTakenError, WatersmeetError
from pipelines.lake.commits import Commit
from pipelines.lake.lease import RENEWAL_S, SILENCE_S, Entry, Lease, is_dead
from tests.lake.conftest import Store


@dataclass
class Time:
    """A clock that a newcomer's waiting moves; `meanwhile` happens in each pause."""

    now_s: float = 0.0
    meanwhile: Callable[[], Any] = field(default=lambda: None)

    def sleep_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.meanwhile()


@pytest.fixture
def leases(folder_store: Store) -> Store:
    folder_store.create("leases")
    return folder_store


def lease(store: Store, *layers: str, time: Time | None = None, alive: bool = True, **more: Any) -> Lease:
    """A lease whose owner before is alive, as far as its process tells."""
    time = time or Time()
    return Lease(
        store.lake,
        store.questions,
        **{"append": store.append, **more},
        layers=layers,
        renews=False,
        sleep_s=time.sleep_s,
        is_dead=lambda _: not alive,
    )


@pytest.mark.promise("O1")
def test_a_layer_has_one_owner_and_other_layers_have_others(leases: Store) -> None:
    bronze, rest = lease(leases, "bronze"), lease(leases, "silver", "gold")
    bronze.take()
    rest.take()
    assert 0 < bronze.token < rest.token
    with pytest.raises(LeaseTakenError, match=r"bronze of .*lake.* is being written by process \d+ on .*; stop that one first"):
        lease(leases, "bronze", "silver", time=Time(meanwhile=bronze.renew)).take()


@pytest.mark.promise("O3")
def test_an_owner_that_has_released_its_layers_is_followed_at_once(leases: Store) -> None:
    first, time = lease(leases, "bronze", "silver"), Time()
    first.take()
    first.release()
    second = lease(leases, "silver", time=time)
    second.take()
    assert (time.now_s, second.must_fence) == (0, False)
    assert second.token > first.token


@pytest.mark.promise("O2")
def test_a_silent_owner_is_replaced_and_learns_of_it(leases: Store) -> None:
    told: list[str] = []
    first = lease(leases, "bronze", on_lost=lambda: told.append("lost"))
    first.take()
    first.check()
    time = Time()
    second = lease(leases, "bronze", time=time)
    second.take()
    assert SILENCE_S <= time.now_s <= SILENCE_S + RENEWAL_S
    assert second.token > first.token
    assert second.must_fence, "the first one may wake up"
    assert not first.renew()
    assert isinstance(first.lost, LeaseLostError)
    assert told == ["lost"]
    with pytest.raises(LeaseLostError):
        first.check()
    first.release()
    with pytest.raises(LeaseTakenError):
        lease(leases, "bronze", time=Time(meanwhile=second.renew)).take()
    assert second.renew()


def test_a_change_takes_the_layers_from_a_living_owner_which_learns_for_what(leases: Store) -> None:
    first, time = lease(leases, "bronze"), Time()
    first.take()
    change = lease(leases, "bronze", "silver", time=time, change="forget")
    change.take()
    assert (time.now_s, change.must_fence, change.must_fence_forget) == (0, True, False)
    assert not first.renew()
    assert first.lost is not None
    assert first.lost.change == "forget"
    assert str(first.lost).endswith(
        "has been taken over by `watersmeet forget`: this one is fenced and writes nothing more; start it again"
    )
    with pytest.raises(LeaseTakenError, match="`watersmeet forget` has it for a moment; try again") as taken:
        lease(leases, "bronze", time=Time(meanwhile=change.renew)).take()
    assert taken.value.change == "forget"


def test_of_two_changes_the_one_that_has_begun_goes_on(leases: Store) -> None:
    first = lease(leases, "bronze", change="evolve")
    first.take()
    with pytest.raises(LeaseTakenError):
        lease(leases, "bronze", time=Time(meanwhile=first.renew), change="forget").take()
    first.check()


def test_a_change_that_falls_silent_is_replaced_and_what_it_did_is_fenced(leases: Store) -> None:
    lease(leases, "silver", change="forget").take()
    time = Time()
    second = lease(leases, "silver", time=time)
    second.take()
    assert time.now_s >= SILENCE_S
    assert (second.must_fence, second.must_fence_forget) == (True, True)


def test_an_owner_that_releases_its_layers_while_it_is_looked_at_is_followed_at_once(leases: Store) -> None:
    first = lease(leases, "bronze", change="forget")
    first.take()
    released = iter([first.release])
    time = Time(meanwhile=lambda: next(released, lambda: None)())
    second = lease(leases, "bronze", time=time)
    second.take()
    assert time.now_s < RENEWAL_S
    assert not second.must_fence
    second.check()


@pytest.mark.promise("O2")
def test_an_owner_that_is_no_process_any_more_is_replaced_at_once(leases: Store) -> None:
    lease(leases, "bronze").take()
    time = Time()
    second = lease(leases, "bronze", time=time, alive=False)
    second.take()
    assert time.now_s == 0
    assert not second.must_fence


def test_a_token_is_larger_than_any_that_a_table_has_seen(leases: Store) -> None:
    first = lease(leases, "bronze")
    first.take(lambda: 41)
    assert first.token == 42
    first.release()
    second = lease(leases, "bronze")
    second.take(lambda: 99)
    assert second.token == 44, "a table of leases with entries needs no other table's word"


@pytest.mark.promise("O1")
def test_of_many_that_take_a_layer_at_once_one_has_it(leases: Store) -> None:
    outcomes: list[object] = []
    barrier = threading.Barrier(6)

    def take() -> None:
        mine = lease(leases, "bronze", time=Time(meanwhile=lambda: None))
        barrier.wait()
        try:
            mine.take()
            outcomes.append(mine.token)
        except WatersmeetError as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(tokens) == len(set(tokens)) > 0
    entries = leases.questions.summary("leases", ["entry"], {"n": ("count", "*")})
    assert set(entries["n"].to_pylist()) == {1}, "an entry has one writer"
    assert sorted(entries["entry"].to_pylist()) == list(range(1, len(entries) + 1))


def test_a_table_that_others_write_to_all_the_time_ends_in_a_sentence(leases: Store) -> None:
    def refused(table: str, rows: pa.Table, commit: Commit) -> None:
        raise CommitFailedError("another writer came first")

    with pytest.raises(WatersmeetError, match=r"leases of .* could not be written to"):
        lease(leases, "bronze", append=refused).take()


def test_a_lease_is_renewed_while_it_is_held(leases: Store) -> None:
    renewed = threading.Event()

    class Watched(Lease):
        def renew(self) -> bool:
            renewed.set()
            return super().renew()

    held = Watched(leases.lake, leases.questions, leases.append, ["bronze"])
    held.take()
    assert renewed.wait(30)
    held.release()
    renewals = Path(str(leases.settings.checkpoints), "_leases")
    assert list(renewals.iterdir()) == [], "a released lease leaves no file"


def test_a_dead_process_is_known_on_its_own_host_alone() -> None:
    here, now = socket.gethostname(), 4_000_000_000_000
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    owner = Entry(1, "bronze", 1, "taken", here, done.pid, None, now)
    assert is_dead(owner)
    assert not is_dead(owner._replace(host="elsewhere"))
    assert not is_dead(owner._replace(jvm_pid=os.getpid())), "its JVM may still finish what it was told to write"
    assert not is_dead(owner._replace(pid=os.getpid()))
    before_start = int(psutil.Process().create_time() * 1000) - 1000
    assert is_dead(owner._replace(pid=os.getpid(), at=before_start)), "another process has its number now"


def test_an_entry_names_the_process_and_no_jvm_where_there_is_none(leases: Store) -> None:
    lease(leases, "bronze").take()
    found = leases.questions.select("leases", ["host", "pid", "event", "layer", "token", "entry"]).to_pylist()
    named = {"host": socket.gethostname(), "pid": os.getpid(), "event": "taken", "layer": "bronze", "token": 1, "entry": 1}
    assert found == [named]
