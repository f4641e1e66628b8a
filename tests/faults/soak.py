"""`make faults`: kills a run again and again, at every named point and at any moment, in every delivery mode.

Each mode has a lake and topics of its own, and a producer that keeps sending while `run` works. A kill is SIGKILL for every
process of the run; between some restarts all checkpoints are deleted. At the end an undisturbed run takes what is left, and
everything is compared with the merge model and looked through by `verify --full`. The seed decides order and moments.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tests.conftest  # noqa: F401  # quick starts
from pipelines.adapters import broker
from pipelines.adapters.lake import Lake
from pipelines.adapters.spark import layer_session, spark_session
from pipelines.audit.verify import verify
from pipelines.faults import POINTS
from tests.support.rivers import Losses, River, until

MODES = ("exactly_once", "at_least_once", "at_most_once")
ANY_MOMENT = "any moment"


@dataclass
class Siege:
    """One mode's river, and what is done to it."""

    river: River
    mode: str
    rng: random.Random
    targets: list[str]

    def run(self) -> int:
        """Carries out every kill; returns how many there were."""
        self.river.flow()
        for nth, target in enumerate(self.targets):
            self._kill(target)
            say(f"{self.mode}: {nth + 1} of {len(self.targets)} killed at {target}")
            if self.rng.random() < 0.3:
                self.river.forget_checkpoints()
        last = self.river.run("--once")
        assert last.wait() == 0, last.said()
        return len(self.targets)

    def _kill(self, target: str) -> None:
        if target == ANY_MOMENT:
            process = self.river.run()
            with self._trickle():
                moment = time.monotonic() + self.rng.uniform(5, 35)
                until(lambda: time.monotonic() > moment or process.process.poll() is not None, "the moment")
                assert process.process.poll() is None, process.said()
                process.kill()
            return
        count = self.rng.randint(2, 9) if target == "publisher.produce" else 1
        process = self.river.run(point=target, count=count)
        with self._trickle(*(["tracking"] if target == "idle.decide" else [])):
            process.await_held()
            process.kill()

    @contextmanager
    def _trickle(self, *sources: str) -> Iterator[None]:
        """Keeps sending."""
        ended = threading.Event()

        def send() -> None:
            while True:
                self.river.flow(*sources, records=6)
                if ended.wait(2.5):
                    return

        producer = threading.Thread(target=send)
        producer.start()
        try:
            yield
        finally:
            ended.set()
            producer.join()


def targets(mode: str, kills: int, rng: random.Random) -> list[str]:
    """Every point of the mode before any a second time, and a third of the kills at any moment."""
    points = [p for p in POINTS if mode == "exactly_once" or p not in ("publisher.begin", "idle.decide")]
    if mode == "at_most_once":
        points.remove("gold.note")  # it notes before it publishes
    chosen: list[str] = []
    while len(chosen) < kills:
        chosen += [*rng.sample(points, len(points)), *[ANY_MOMENT] * (len(points) // 3)]
    first = chosen[:kills]
    rng.shuffle(first)
    return first


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=52)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = broker.start(Path(folder) / "broker")
        assert started.bootstrap_servers is not None
        try:
            return besiege(started.bootstrap_servers, Path(folder), options.seed, options.kills)
        finally:
            broker.stop(Path(folder) / "broker")


def besiege(kafka: str, folder: Path, seed: int, kills: int) -> int:
    shares = {"exactly_once": kills - 2 * (kills // 3), "at_least_once": kills // 3, "at_most_once": kills // 3}
    sieges = []
    for mode in MODES:
        rng = random.Random(f"{seed}/{mode}")
        idle_after = "3s" if mode == "exactly_once" else None
        name = f"siege-{mode.replace('_', '-')}"
        river = River.make(kafka, folder / mode, name, seed=seed, publish__delivery=mode, merge__idle_after=idle_after)
        sieges.append(Siege(river, mode, rng, targets(mode, shares[mode], rng)))
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(Siege.run, sieges))
    spark, failed = layer_session(spark_session()), False
    sys.stdout.write(f"seed {seed}: {sum(done)} kills in {time.monotonic() - begun:.0f} s\n")
    for siege, count in zip(sieges, done, strict=True):
        found = siege.river.losses(spark, gaps_allowed=siege.mode == "at_most_once")
        lake = Lake(spark, siege.river.settings)
        broken = verify(lake, siege.river.settings, full=True)["problems"]
        lost = f"{found.lost} lost"
        if siege.mode == "at_most_once":
            lost, found.lost = f"{found.lost} not sent (which this mode allows), 0 lost otherwise", 0
        sys.stdout.write(
            f"{siege.mode}: {count} kills, {lost}, {found.repeated} repeated, {found.out_of_order} out of order, "
            f"{len(found.other)} tables that differ, {len(broken)} promises broken by verify --full\n"
        )
        for problem in [*found.other, *map(str, broken)]:
            sys.stdout.write(f"  {problem}\n")
        failed |= found != Losses() or bool(broken)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
