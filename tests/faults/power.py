"""Power cuts: a lake whose folder forgets what was not synced, again and again.

`python -m tests.faults.power --seeds 300` tries so many seeds on a broker of its own; a failure is
said with its seed, and with what the cut took. Each seed is a lake, and some runs on it, whose
power goes at some call that makes, names or syncs a file (`tests.support.forgetful`), or just after
the run has ended. At the end an undisturbed run takes what is left, and tables, topics and promises
are compared with the merge model, by what the seed's delivery mode promises.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import SparkSession

import tests.conftest  # noqa: F401  # quick starts
from tests.faults.command import brokered, say, session_for
from tests.faults.wired import MODES, broken_by
from tests.support.configurations import IDS
from tests.support.forgetful import ForgetfulFolder
from tests.support.rivers import EMBEDDED, FOLDER, River, until
from tests.support.topics import Access
from watersmeet.lake.log_files import LAST_VACUUM

LAKES = {"embedded": EMBEDDED, "spark": FOLDER}

CALLS = 400
"""About how many calls a first run makes below its lake."""


def drawn(rng: random.Random, name: str) -> dict[str, Any]:
    """What a lake is configured to do beside the merge."""
    more: dict[str, Any] = {}
    if rng.random() < 0.5:
        more |= {"publish__late_topic": f"{name}-late"}
    if rng.random() < 0.4:
        more |= {"publish__corrections": {"topic": f"{name}-corrected", "within": "1d"}}
    if rng.random() < 0.3:
        more |= IDS
    if rng.random() < 0.3:
        more |= {"kafka__max_offsets_per_batch": 16}
    return more


class Outage(NamedTuple):
    """What became of a command whose power went in its midst, or once it had ended."""

    status: int | None
    """Its exit status; None where it did not come to its end."""
    said: str
    calls: int
    """How many calls it made below the lake."""
    taken: list[str]
    """What the power cut took."""

    def described(self, at: int, command: str) -> list[str]:
        """Lines for whoever looks at a failure."""
        cut = f"cut at {at}" if self.status is None else "not cut"
        what = f"{cut}: {command} made {self.calls} calls"
        return [what, *(f"  {line}" for line in self.taken)]


def not_durable(folder: ForgetfulFolder) -> list[str]:
    """What a power cut could take, and should not. What an owner says to show that it lives means
    nothing afterwards, checksums wait for the next commit, and Spark notes of a vacuum what only a
    lite one reads."""
    passing = "_checkpoints", ".crc: ", f"{LAST_VACUUM}: "
    return [each for each in folder.not_durable() if not any(name in each for name in passing)]


def lose_power(river: River, rng: random.Random, at: int, *words: str) -> Outage:
    """A command of a river, whose power goes at the n-th call (0: never) or else once it has ended;
    whatever a command that went well has left must be durable."""
    command, *arguments = words
    place = river.folder / "forgetful"
    place.mkdir(exist_ok=True)
    forgetful = ForgetfulFolder(Path(str(river.as_folder.lake)), place)
    river.config["durable"] = True
    river.write()
    river.environment = forgetful.environment(at)
    try:
        run = river.run(*arguments, command=command)
    finally:
        river.environment = None
    try:
        until(lambda: forgetful.is_cut or run.process.poll() is not None, "the cut, or the end")
    except BaseException:
        run.kill()
        raise
    status = None
    if forgetful.is_cut:
        run.kill()
    elif (status := run.wait()) == 0:
        left = not_durable(forgetful)
        assert not left, f"{words} has ended, and this is not durable: {left}"
    return Outage(status, run.said(), forgetful.calls, forgetful.forget(rng))


@dataclass
class PowerCuts:
    """One lake, and the power cuts that it has had."""

    river: River
    rng: random.Random
    mode: str
    told: list[str] = field(default_factory=list)
    calls: int = CALLS

    @classmethod
    def begin(
        cls, kafka: Access, folder: Path, lake: str, seed: int, spark: SparkSession | None
    ) -> PowerCuts:
        """A new lake: the seed says of which kind."""
        rng, mode = random.Random(f"power/{lake}/{seed}"), MODES[seed % len(MODES)]
        name = f"power-{lake}-{seed}-{time.monotonic_ns() % 10**6}"
        more = {"publish__delivery": mode, **drawn(rng, name)}
        river = River.make(kafka, folder, name, lake=lake, seed=seed, **more)
        river.spark = spark
        return cls(river, rng, mode)

    def cut(self) -> None:
        """A run, or `maintain`, whose power goes."""
        self.river.flow(records=self.rng.choice([3, 12, 40]))
        at = 0 if self.rng.random() < 0.1 else self.rng.randint(1, self.calls)
        is_run = not self.told or self.rng.random() < 0.8
        words = ("run", "--once") if is_run else ("maintain",)
        outage = lose_power(self.river, self.rng, at, *words)
        if outage.status is not None:
            is_nothing = not is_run and "no lake has begun" in outage.said
            assert outage.status == 0 or is_nothing, outage.said
            self.calls = outage.calls if is_run else self.calls
        self.told += outage.described(at, words[0])

    def judge(self) -> list[str]:
        """What is wrong at the end."""
        self.river.flow()
        self.river.finish()
        return broken_by(self.river, self.mode)


def cut_again_and_again(
    kafka: Access,
    folder: Path,
    lake: str,
    seed: int,
    cuts: int = 6,
    spark: SparkSession | None = None,
) -> PowerCuts:
    """The life of a lake with power cuts; raises AssertionError where something is lost, repeated,
    or not said rightly. `spark`: for undisturbed runs with Spark."""
    power = PowerCuts.begin(kafka, folder, lake, seed, spark)
    try:
        for _ in range(power.rng.randint(1, cuts)):
            power.cut()
        problems = power.judge()
    except Exception as error:
        raise AssertionError(
            "\n".join([f"seed {seed} on {lake}:", *power.told, traceback.format_exc()])
        ) from error
    assert not problems, "\n".join([f"seed {seed} on {lake}:", *power.told, *problems])
    return power


def main() -> None:
    parser = argparse.ArgumentParser(description="Power cuts on lakes, one seed after the other.")
    parser.add_argument("--engine", choices=LAKES, default="embedded")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--cuts", type=int, default=6, help="of a seed, at most")
    arguments = parser.parse_args()
    lake, spark = LAKES[arguments.engine], session_for(arguments.engine)
    failed = list[int]()
    with brokered() as (kafka, folder):
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            own = folder / f"seed-{seed}"
            try:
                power = cut_again_and_again(kafka, own, lake, seed, arguments.cuts, spark)
                spoiled = sum(line.startswith(" ") for line in power.told)
                cuts = len(power.told) - spoiled
                say(f"seed {seed}: good, {cuts} power cuts, {spoiled} files spoiled or gone")
            except AssertionError as failure:
                failed.append(seed)
                sys.stdout.write(f"{failure}\n{''.join(_log_of(own)[-30:])}\n")
                sys.stdout.flush()
            shutil.rmtree(own, ignore_errors=True)
    sys.stdout.write(f"{arguments.seeds} seeds on {arguments.engine}, failed: {failed or 'none'}\n")
    sys.exit(bool(failed))


def _log_of(folder: Path) -> list[str]:
    log = folder / "run.log"
    return log.read_text(errors="replace").splitlines(keepends=True) if log.exists() else []


if __name__ == "__main__":
    main()
