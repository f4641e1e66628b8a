"""`make faults`: kills a run again and again, at every named point and at any moment, in every
delivery mode; and has two owners on a lake, clocks that are set, transactions of others that stay
open, and tables that somebody restores.

On a folder, or in Spark's own catalog, whose metastore outlives the process. Each mode has a lake
and topics of its own, and a producer that keeps sending while `run` works. A kill is SIGKILL for
every process of the run; between some restarts all checkpoints are deleted. At the end an
undisturbed run takes what is left, and everything is compared with the merge model and looked
through by `verify --full`. The seed decides order and moments. One more lake of each kind has
tenants, and windows by gap. Lives as `make lives` has them come beside these, whose commands are
processes. With `POWER=1` the power goes, too; with `WIRE=1` all runs go by a wire that lies.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

import tests.conftest  # noqa: F401  # quick starts
from tests.faults.command import brokered, is_on, lying, say
from tests.faults.lives import (
    KILLED,
    REPLACED,
    Fate,
    Step,
    kinds_of,
    live,
    parse,
    random_life,
    text_of,
)
from tests.faults.power import CALLS, lose_power
from tests.support.cases import SOURCES, keyed
from tests.support.configurations import IDS
from tests.support.fault_points import POINTS
from tests.support.lives import KilledError
from tests.support.owners import assert_refused, wake
from tests.support.repeating import repeating
from tests.support.rivers import (
    CATALOG,
    DEADLINE_S,
    EMBEDDED,
    EVEN_SMALL_BATCHES_IN_TASKS,
    LAKES,
    Losses,
    River,
    in_chunks,
    until,
    warehouse,
)
from tests.support.tenant_rivers import TenantRiver
from watersmeet.lake import tables
from watersmeet.lake.commits import last_decision
from watersmeet.lake.tables import APPLICATION

ANY_MOMENT = "any moment"


OF_EXACTLY_ONCE = ("idle.decide", "letters.publish", "letters.note")
"""Points that only the rivers of this mode reach, which have the idle policy and topics of dead
letters."""

SECOND_OWNER, STOOD_STILL = "a second owner", "an owner that stood still"
CLOCK, TRANSACTION, RESTORED, TASKS, POWER = (
    "a clock that was set",
    "an open transaction",
    "a table that was restored",
    "tasks of Spark that were killed",
    "a power cut",
)
POWER_CUTS = [POWER] * 3 if is_on("POWER") else []
INCIDENTS = (*POWER_CUTS, SECOND_OWNER, STOOD_STILL, CLOCK, TRANSACTION, RESTORED, TASKS)
IN_ONE_PROCESS = (CLOCK, TRANSACTION, TASKS)
"""What can happen to a lake in Spark's own catalog: its metastore lets one process in at a time,
and its tables have no path."""

IN_ONE_PROCESS_ONLY = ("silence", "replaced")
"""Events of lives that other incidents are here."""

AN_HOUR_S = 3600

LEAST_TASKS = 5
"""So many tasks are killed at least, one after the other."""

TRIED_AGAIN = {"spark.master": "local[2,8]"}
"""Without a cluster Spark tries a task once, unless it is told otherwise."""

CHUNK = 5
"""So many messages are produced at a time: a crash may come between any two pieces."""


@contextmanager
def by_wire(river: River, seed: str) -> Iterator[None]:
    """With `WIRE=1`, the runs of a river reach Kafka by a wire that lies."""
    direct = river.config["kafka"]
    with lying(str(river.kafka), seed) as between:
        if between is not None:
            river.config["kafka"] = {**direct, "bootstrap_servers": between.bootstrap_servers}
            river.write()
        yield
    river.config["kafka"] = direct
    river.write()


def cut_power(river: River, rng: random.Random) -> None:
    """In the midst of a run, or once it has ended."""
    outage = lose_power(river, rng, rng.randint(1, CALLS), "run", "--once")
    assert not outage.status, outage.said


@dataclass
class Siege:
    """One river, and what is done to it."""

    lake: str
    mode: str
    river: River
    rng: random.Random
    targets: list[str]

    def run(self) -> int:
        """Carries out every kill and incident; returns how many there were."""
        self.river.flow()
        for nth, target in enumerate(self.targets):
            with by_wire(self.river, f"{self.river.seed}/{self.lake}/{self.mode}/{nth}"):
                self._suffer(target)
            say(f"{self.lake}, {self.mode}: {nth + 1} of {len(self.targets)}: {target}")
            if self.rng.random() < 0.3:
                self.river.forget_checkpoints()
        self.river.finish()
        return len(self.targets)

    def _suffer(self, target: str) -> None:
        incidents = {
            ANY_MOMENT: self._kill_at_any_moment,
            SECOND_OWNER: self._start_another,
            STOOD_STILL: self._replace_one_that_stands_still,
            CLOCK: self._set_the_clock,
            TRANSACTION: self._leave_a_transaction_open,
            RESTORED: self._restore,
            TASKS: self._kill_tasks,
            POWER: self._cut_power,
        }
        if target in incidents:
            incidents[target]()
        else:
            self._kill(target)
        self._delete_what_is_no_table()

    def _delete_what_is_no_table(self) -> None:
        """As the error says that a start ends with where a creation was cut short."""
        if self.lake == CATALOG:
            for folder in Path(warehouse(self.river.folder)).glob("*"):
                if not [*folder.glob("_delta_log/*.json")]:
                    shutil.rmtree(folder)

    def _kill(self, target: str) -> None:
        count = self.rng.randint(1, 3) if target == "publisher.produce" else 1
        process = self.river.run(point=target, count=count)
        with self._trickle(*(["tracking"] if target == "idle.decide" else [])):
            process.await_held()
            process.kill()

    def _kill_at_any_moment(self) -> None:
        process = self.river.run()
        with self._trickle():
            moment = time.monotonic() + self.rng.uniform(5, 45)
            until(
                lambda: time.monotonic() > moment or process.process.poll() is not None,
                "the moment",
            )
            assert process.process.poll() is None, process.said()
            process.kill()

    def _start_another(self) -> None:
        """With a clock of its own, an hour off: it is refused all the same."""
        first = self.river.run(point=self._some_point())
        with self._trickle():
            first.await_held()
            with self._clock_off():
                assert_refused(self.river)
            first.kill()

    def _replace_one_that_stands_still(self) -> None:
        first = self.river.run(point=self._some_point())
        with self._trickle():
            first.await_held()
            first.pause()
        self.river.finish()
        wake(first)

    def _set_the_clock(self) -> None:
        with self._clock_off():
            self._kill(self._some_point())
            self._kill_at_any_moment()

    def _leave_a_transaction_open(self) -> None:
        """Over the death of a run, for longer than a source may be silent; its records come or are
        aborted."""
        source, partition, begin = (
            self.rng.choice(SOURCES),
            self.rng.randrange(self.river.partitions),
            self.river.chunks * 1000,
        )
        values = [keyed(key, begin + self.rng.randrange(1000)) for key in ("a", "z")]
        end = self.river.begin_transaction(
            source, partition, values, commit=self.rng.random() < 0.7
        )
        self._kill(self._some_point())
        self._kill_at_any_moment()
        end()

    def _restore(self) -> None:
        """Silver is taken back to an earlier version; a run is refused until it is taken forward
        again."""
        while (merged := self._last_merged()) < 2:
            self.river.flow()
            self.river.finish()
        table = DeltaTable(str(Path(str(self.river.as_folder.lake)) / tables.SILVER))
        last = table.version()
        table.restore(self.rng.randrange(1, merged))
        self.river.flow()
        run = self.river.run("--once")
        assert run.wait() == 2, run.said()
        assert "was taken back" in run.said()
        table.update_incremental()
        table.restore(last)

    def _cut_power(self) -> None:
        with self._trickle():
            cut_power(self.river, self.rng)

    def _kill_tasks(self) -> None:
        """The workers in which tasks are, again and again: Spark tries each task anew, also where
        an attempt has written something."""
        killed = 0
        with self._program(EVEN_SMALL_BATCHES_IN_TASKS):
            run = self.river.run()
        with self._trickle():
            end = time.monotonic() + self.rng.uniform(20, 40)
            while killed < LEAST_TASKS or time.monotonic() < end:
                assert time.monotonic() < end + DEADLINE_S, f"{killed} killed: {run.said()}"
                assert run.process.poll() is None, run.said()
                killed += run.kill_a_task(self.rng)
                time.sleep(self.rng.uniform(0.2, 2))
            run.kill()

    def _last_merged(self) -> int:
        """The version of silver that holds the last batch; what comes after it are fences, which
        nobody misses."""
        reader = self.river.reader
        if not reader.exists(tables.SILVER):
            return -1
        decision = last_decision(reader, tables.SILVER, APPLICATION)
        return -1 if decision is None else decision[0]

    def _some_point(self) -> str:
        return self.rng.choice(("bronze.append", "silver.merge", "silver.done", "gold.publish"))

    @contextmanager
    def _clock_off(self) -> Iterator[None]:
        off_by_s = self.rng.choice((-AN_HOUR_S, AN_HOUR_S))
        with self._program(in_chunks(CHUNK, clock_off_by_s=off_by_s)):
            yield

    @contextmanager
    def _program(self, program: Sequence[str]) -> Iterator[None]:
        usual = self.river.program
        self.river.program = program
        yield
        self.river.program = usual

    @contextmanager
    def _trickle(self, *sources: str) -> Iterator[None]:
        """Keeps sending."""
        with repeating(lambda: self.river.flow(*sources, records=6), 2.5):
            yield

    def judge(self) -> bool:
        """Whether nothing was lost that the mode keeps, and nothing repeated or broken; says so."""
        found = self.river.losses(gaps_allowed=self.mode == "at_most_once")
        broken = self.river.broken_promises()
        lost = f"{found.lost} lost"
        if self.mode == "at_most_once":
            lost, found.lost = (
                f"{found.lost} not sent (which this mode allows), 0 lost otherwise",
                0,
            )
        sys.stdout.write(
            f"{self.lake}, {self.mode}: {len(self.targets)} kills, {lost}, {found.repeated} "
            "repeated, "
            f"{found.out_of_order} out of order, {len(found.other)} tables that differ, "
            f"{len(broken)} promises broken by verify --full\n"
        )
        for problem in [*found.other, *broken]:
            sys.stdout.write(f"  {problem}\n")
        return found == Losses() and not broken


@dataclass
class TenantSiege:
    """A river with tenants, and the points at which its runs are killed, each with the next share
    of its records."""

    lake: str
    tenants: TenantRiver
    rng: random.Random
    targets: list[str]

    def run(self) -> int:
        """Carries out every kill; returns how many there were."""
        for nth, target in enumerate(self.targets):
            self.tenants.arrive((nth + 1) / (len(self.targets) + 1))
            river = self.tenants.river
            with by_wire(river, f"{river.seed}/{self.lake}/tenants/{nth}"):
                cut_power(river, self.rng) if target == POWER else river.kill_at(target)
            say(f"{self.lake}, tenants: {nth + 1} of {len(self.targets)} killed at {target}")
            if self.rng.random() < 0.3:
                self.tenants.river.forget_checkpoints()
        self.tenants.arrive(1)
        self.tenants.river.finish()
        return len(self.targets)

    def judge(self) -> bool:
        """Whether late, silver and the sink are the model's, and no promise is broken; says so."""
        self.tenants.river.by_embedded()
        differing, broken = self.tenants.differing(), self.tenants.river.broken_promises()
        differ = ", ".join(differing) or "nothing"
        sys.stdout.write(
            f"{self.lake}, tenants: {len(self.targets)} kills, {differ} differs from the model, "
            f"{len(broken)} promises broken by verify --full\n"
        )
        for problem in broken:
            sys.stdout.write(f"  {problem}\n")
        return not differing and not broken


@dataclass
class KilledLife(Fate):
    """A life (`tests.faults.lives`) whose commands are processes of their own, and whose kills are
    SIGKILL."""

    point: str | None = None

    @contextmanager
    def armed(self, step: Step) -> Iterator[None]:
        assert step.mark != REPLACED, "who else has the lake is an incident of its own"
        self.point = step.point if step.mark == KILLED else None
        with super().armed(step):
            yield
        self.point = None

    def do(self, *arguments: str) -> tuple[int, str]:
        if self.power_until:
            return super().do(*arguments)
        self.river.write()
        command, *others = arguments
        point, _, count = (self.point or "").partition(":")
        run = self.river.run(*others, command=command, point=point or None, count=int(count or 1))
        until(lambda: run.is_held or run.process.poll() is not None, "the end, or the fault point")
        if run.is_held:
            run.kill()
            self.point = None
            raise KilledError
        self._told(arguments, run.wait(), run.said())
        return run.wait(), run.said()


@dataclass
class Lives:
    """Lives of a kind of lake, each with some events, a kill among them."""

    lake: str
    kafka: str
    folder: Path
    rng: random.Random
    kills: int
    problems: list[str] = field(default_factory=list)

    def run(self) -> int:
        """Lives so many lives; returns how many there were."""
        for nth in range(self.kills):
            seed = f"{self.rng.randrange(10**9)}"
            text = random_life(random.Random(seed), 6)
            steps = [step for step in parse(text) if step.event not in IN_ONE_PROCESS_ONLY]
            text = " ".join([*kinds_of(text), text_of(steps)])
            engine = "embedded" if self.lake == EMBEDDED else "spark"
            told = live(self.kafka, self.folder, engine, text, seed, KilledLife)
            if told.problem is not None:
                self.problems.append(f"{text}\n{told.problem}")
            say(f"{self.lake}, lives: {nth + 1} of {self.kills}: {text}")
        return self.kills

    def judge(self) -> bool:
        """Whether whatever happened lost, repeated and broke nothing; says so."""
        sys.stdout.write(f"{self.lake}, lives: {self.kills}, {len(self.problems)} with a fault\n")
        for problem in self.problems:
            sys.stdout.write(f"  {problem}\n")
        return not self.problems


def targets(lake: str, mode: str, kills: int, rng: random.Random) -> list[str]:
    """Every incident and point of the mode before any a second time, and a third of the kills at
    any moment."""
    points = [p for p in POINTS if mode == "exactly_once" or p not in OF_EXACTLY_ONCE]
    if mode == "at_most_once":
        points.remove("gold.note")  # it notes before it publishes
    impossible = {TASKS} if lake == EMBEDDED else set[str]()
    if mode != "exactly_once":
        impossible.add(STOOD_STILL)  # without transactions, Kafka does not stop who wakes up
    every = IN_ONE_PROCESS if lake == CATALOG else INCIDENTS
    incidents = [incident for incident in every if incident not in impossible]
    return _chosen(points, incidents, [ANY_MOMENT] * (len(points) // 3), kills, rng)


def _chosen(
    points: Sequence[str], first: Sequence[str], last: Sequence[str], kills: int, rng: random.Random
) -> list[str]:
    chosen: list[str] = []
    while len(chosen) < kills:
        chosen += [*first, *rng.sample(points, len(points)), *last]
    chosen = chosen[:kills]
    rng.shuffle(chosen)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=51, help="on each kind of lake")
    parser.add_argument("--lake", choices=[*LAKES, "all"], default="all")
    options = parser.parse_args()
    lakes = LAKES if options.lake == "all" else (options.lake,)
    with brokered() as (kafka, folder):
        return besiege(kafka, folder, lakes, options.seed, options.kills)


def _corrected(name: str) -> dict[str, Any]:
    """A river of this name has its late records corrected."""
    return {"publish__corrections": {"topic": f"{name}-corrected", "within": "1d"}}


def besiege(kafka: str, folder: Path, lakes: Sequence[str], seed: int, kills: int) -> int:
    shares = {
        "exactly_once": kills - 2 * (kills // 3),
        "at_least_once": kills // 3,
        "at_most_once": kills // 3,
    }
    sieges: list[Siege | TenantSiege | Lives] = []
    for mode, share in shares.items():
        for lake in lakes:
            rng = random.Random(f"{seed}/{lake}/{mode}")
            name = f"siege-{lake}-{mode.replace('_', '-')}"
            changes: dict[str, Any] = {"publish__delivery": mode, **_corrected(name), **IDS}
            if mode == "exactly_once":
                changes |= {
                    f"publish__{table}_topic": f"{name}-{table}" for table in ("late", "quarantine")
                }
                changes["merge__idle_after"] = "3s"
            river = River.make(kafka, folder / name, name, lake=lake, seed=seed, **changes)
            if lake != EMBEDDED:
                river.config.setdefault("spark", {}).update(TRIED_AGAIN)
                river.write()
            river.program = in_chunks(CHUNK)
            sieges.append(Siege(lake, mode, river, rng, targets(lake, mode, share, rng)))
    for lake in lakes:
        rng, name = random.Random(f"{seed}/{lake}/tenants"), f"siege-{lake}-tenants"
        tenants = TenantRiver(
            kafka,
            folder / name,
            name,
            partitions=2,
            lengths=[40 * kills],
            lake=lake,
            **_corrected(name),
        )
        tenants.river.program = in_chunks(CHUNK)
        points = [point for point in POINTS if point not in OF_EXACTLY_ONCE]
        first = [] if lake == CATALOG else POWER_CUTS
        sieges.append(TenantSiege(lake, tenants, rng, _chosen(points, first, [], kills // 3, rng)))
    sieges += [
        Lives(
            lake, kafka, folder / f"lives-{lake}", random.Random(f"{seed}/{lake}/lives"), kills // 6
        )
        for lake in lakes
        if lake != CATALOG  # whose lake is no folder that can be lost
    ]
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda siege: siege.run(), sieges))
    sys.stdout.write(f"seed {seed}: {sum(done)} kills in {time.monotonic() - begun:.0f} s\n")
    verdicts = [siege.judge() for siege in sieges]
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
