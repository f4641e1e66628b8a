"""One owner for each layer at a time. Time is moved; nobody waits."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake.exceptions import CommitFailedError

from tests.lake.conftest import Store, settings_for
from tests.support.panics import PanicException
from watersmeet.errors import LeaseLostError, LeaseTakenError, WatersmeetError
from watersmeet.lake import lease as leasing
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.commits import Commit
from watersmeet.lake.lease import (
    RENEWAL_S,
    SILENCE_S,
    Entry,
    Lease,
    is_dead,
    process_table,
    start_ticks,
)
from watersmeet.lake.location import Lake


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


def lease(
    store: Store, *layers: str, time: Time | None = None, alive: bool = True, **more: Any
) -> Lease:
    """A lease whose owner before is alive, as far as its process tells."""
    time = time or Time()
    return Lease(
        store.lake,
        store.reader,
        **{"append": store.append, **more},
        layers=layers,
        renews=False,
        sleep_s=time.sleep_s,
        is_dead=lambda _: not alive,
    )


@pytest.mark.promise("O1")
@pytest.mark.fault("owners")
def test_a_layer_has_one_owner_and_other_layers_have_others(leases: Store) -> None:
    bronze, rest = lease(leases, "bronze"), lease(leases, "silver", "gold")
    bronze.take()
    rest.take()
    assert 0 < bronze.token < rest.token
    with pytest.raises(
        LeaseTakenError,
        match=r"bronze of .*lake.* is being written by process \d+ on .*; stop that one first",
    ):
        lease(leases, "bronze", "silver", time=Time(meanwhile=bronze.renew)).take()


@pytest.mark.promise("O3")
@pytest.mark.fault("owners")
def test_an_owner_that_has_released_its_layers_is_followed_at_once(leases: Store) -> None:
    first, time = lease(leases, "bronze", "silver"), Time()
    first.take()
    first.release()
    second = lease(leases, "silver", time=time)
    second.take()
    assert time.now_s == 0
    assert second.token > first.token


@pytest.mark.promise("O2")
@pytest.mark.fault("owners")
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
    assert time.now_s == 0
    assert not first.renew()
    assert first.lost is not None
    assert first.lost.change == "forget"
    assert str(first.lost).endswith(
        "has been taken over by `watersmeet forget`: this one is fenced and writes nothing more; "
        "start it again"
    )
    with pytest.raises(
        LeaseTakenError, match="`watersmeet forget` has it for a moment; try again"
    ) as taken:
        lease(leases, "bronze", time=Time(meanwhile=change.renew)).take()
    assert taken.value.change == "forget"


def test_of_two_changes_the_one_that_has_begun_goes_on(leases: Store) -> None:
    first = lease(leases, "bronze", change="evolve")
    first.take()
    with pytest.raises(LeaseTakenError):
        lease(leases, "bronze", time=Time(meanwhile=first.renew), change="forget").take()
    first.check()


def test_a_change_that_falls_silent_is_replaced(leases: Store) -> None:
    lease(leases, "silver", change="forget").take()
    time = Time()
    second = lease(leases, "silver", time=time)
    second.take()
    assert time.now_s >= SILENCE_S


def test_an_owner_that_releases_its_layers_while_it_is_looked_at_is_followed_at_once(
    leases: Store,
) -> None:
    first = lease(leases, "bronze", change="forget")
    first.take()
    released = iter([first.release])
    time = Time(meanwhile=lambda: next(released, lambda: None)())
    second = lease(leases, "bronze", time=time)
    second.take()
    assert time.now_s < RENEWAL_S
    second.check()


@pytest.mark.promise("O2")
@pytest.mark.fault("kill")
def test_an_owner_that_is_no_process_any_more_is_replaced_at_once(leases: Store) -> None:
    lease(leases, "bronze").take()
    time = Time()
    second = lease(leases, "bronze", time=time, alive=False)
    second.take()
    assert time.now_s == 0


def test_a_token_is_larger_than_any_that_a_table_has_seen(leases: Store) -> None:
    first = lease(leases, "bronze")
    first.take(lambda: 41)
    assert first.token == 42
    first.release()
    second = lease(leases, "bronze")
    second.take(lambda: 99)
    assert second.token == 100, "an earlier copy of `leases` may have been put in its place"


@pytest.mark.promise("O1")
@pytest.mark.fault("owners")
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
    entries = leases.reader.summary("leases", ["entry"], {"n": ("count", "*")})
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

    held = Watched(leases.lake, leases.reader, leases.append, ["bronze"])
    held.take()
    assert renewed.wait(30)
    held.release()
    renewals = Path(str(leases.settings.checkpoints), "_leases")
    assert list(renewals.iterdir()) == [], "a released lease leaves no file"


@pytest.mark.parametrize("failure", [OSError("the store is away"), PanicException("no thread")])
def test_a_renewal_that_fails_is_tried_again(
    leases: Store, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    monkeypatch.setattr(leasing, "RENEWAL_S", 0.001)
    failures = [failure]
    renewed = threading.Event()

    class FailingOnce(Lease):
        def renew(self) -> bool:
            if failures:
                raise failures.pop()
            renewed.set()
            return super().renew()

    held = FailingOnce(leases.lake, leases.reader, leases.append, ["bronze"])
    held.take()
    assert renewed.wait(10)
    held.release()


def entry_of(pid: int, started: int | None, **more: Any) -> Entry:
    """An entry of a process of this process table, whose wall clock may say anything."""
    here = process_table()
    named = {"boot_id": here.boot_id, "namespace": here.namespace, "started": started, **more}
    return Entry(1, "bronze", 1, "taken", "any host name", pid, None, 0, **named)


@pytest.fixture
def ended() -> int:
    """The number of a process that is no more."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


@pytest.mark.promise("O2")
@pytest.mark.fault("kill")
def test_an_owner_is_certainly_dead_where_its_own_process_table_lacks_its_process(
    ended: int,
) -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    assert is_dead(entry_of(ended, 1))
    assert not is_dead(entry_of(os.getpid(), ticks))
    assert is_dead(entry_of(os.getpid(), ticks - 1)), "another process has its number now"
    with_jvm = entry_of(ended, 1)._replace(jvm_pid=os.getpid(), jvm_started=ticks)
    assert not is_dead(with_jvm), "its JVM may still finish what it was told to write"
    assert is_dead(with_jvm._replace(jvm_started=ticks - 1))
    assert not is_dead(entry_of(1, start_ticks(1))), "also where the process is another user's"


@pytest.mark.promise("O10")
@pytest.mark.fault("owners", "clock")
def test_a_host_name_a_process_number_and_a_wall_clock_prove_no_death(ended: int) -> None:
    here = entry_of(ended, 1)
    for unsaid in (
        here._replace(boot_id=None),
        here._replace(namespace=None),
        here._replace(started=None),
    ):
        assert not is_dead(unsaid), "where the system does not tell it"
    for elsewhere in (here._replace(boot_id="another"), here._replace(namespace="another")):
        assert not is_dead(elsewhere), "two containers of one host name share no process table"
    mine = entry_of(os.getpid(), start_ticks(os.getpid()))
    for at in (0, 4_000_000_000_000):
        assert not is_dead(mine._replace(at=at, host=socket.gethostname())), (
            "whatever the clock was set to"
        )


TAKE = """
import sys, time
from pathlib import Path
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.lease import Lease
from watersmeet.lake.location import Lake
from tests.lake.conftest import Store, settings_for
folder = Path(sys.argv[1])
lake = Lake(settings_for(folder, lake=sys.argv[2]))
store = Store(lake, DeltaRsReader(lake), Path(sys.argv[2]), None)
lease = Lease(lake, store.reader, store.append, ["bronze"], renews=False)
lease.take()
print("taken", flush=True)
for _ in sys.stdin:
    lease.renew()
    print("renewed", flush=True)
"""


@pytest.mark.promise("O10")
@pytest.mark.fault("owners")
@pytest.mark.long
def test_an_owner_in_another_process_namespace_with_the_same_host_name_is_never_taken_for_dead(
    leases: Store, tmp_path: Path
) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*apart, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("a process namespace of its own takes `unshare` and the permission for it")
    words = [*apart, sys.executable, "-c", TAKE, str(tmp_path), str(leases.folder)]
    owner = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == "taken\n"

        def renew() -> None:
            assert owner.stdin is not None
            assert owner.stdout is not None
            owner.stdin.write("\n")
            owner.stdin.flush()
            assert owner.stdout.readline() == "renewed\n"

        newcomer = Lease(
            leases.lake,
            leases.reader,
            leases.append,
            ["bronze"],
            renews=False,
            sleep_s=lambda _: renew(),
        )
        with pytest.raises(LeaseTakenError, match="is being written by process"):
            newcomer.take()
    finally:
        owner.kill()
        owner.wait()


@pytest.mark.promise("O2")
@pytest.mark.fault("owners")
def test_lakes_that_share_their_checkpoints_know_their_own_owners(
    leases: Store, tmp_path: Path
) -> None:
    shared = str(leases.settings.checkpoints)
    lake = Lake(settings_for(tmp_path, lake=str(tmp_path / "another"), checkpoints=shared))
    another = Store(lake, DeltaRsReader(lake), tmp_path / "another", None)
    another.create("leases")
    silent, living = lease(leases, "bronze"), lease(another, "bronze")
    silent.take()
    living.take()
    assert silent.token == living.token
    lease(leases, "bronze", time=Time(meanwhile=living.renew)).take()
    with pytest.raises(LeaseTakenError):
        lease(another, "bronze", time=Time(meanwhile=living.renew)).take()
    assert living._files.exists(living._path(living._id))


@pytest.mark.promise("O13")
@pytest.mark.fault("owners")
def test_an_owner_whose_renewal_crossed_a_takeover_learns_it_from_the_table(leases: Store) -> None:
    first = lease(leases, "bronze")
    first.take()
    second = lease(leases, "bronze")
    second.take()
    renewal = Path(str(leases.settings.checkpoints), "_leases", first._id)
    assert not renewal.exists()
    renewal.write_text("a renewal that was under way")
    renewed = [first.renew() for _ in range(5)]
    assert renewed[-1] is False
    assert isinstance(first.lost, LeaseLostError)
    assert not renewal.exists(), "nor does it leave a file"


def test_an_entry_names_the_process_and_no_jvm_where_there_is_none(leases: Store) -> None:
    lease(leases, "bronze").take()
    found = leases.reader.select(
        "leases", ["host", "pid", "event", "layer", "token", "entry"]
    ).to_pylist()
    named = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "event": "taken",
        "layer": "bronze",
        "token": 1,
        "entry": 1,
    }
    assert found == [named]
