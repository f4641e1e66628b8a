"""Runs on an object store that lies (`tests.support.lying_store`), each by a seed: a lake on a real
S3 server, by the embedded engine, with new records and sometimes a crash between its runs; in a
third of them, a process of a run is killed in the midst of a request (`--engine spark`: in all).

`python -m tests.faults.stored --seeds 50 --first 1` tries so many, on a broker and a server of its
own; a failure is said with its seed and with the lies that were told. `--lies TEXT` tells those
instead. At the end an undisturbed run on the store itself takes what is left, and tables, topics
and promises are compared with the merge model.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tests.conftest  # noqa: F401  # quick starts
from tests.faults.command import brokered, say
from tests.faults.power import LAKES
from tests.stores.spark_on_s3 import settings_of
from tests.support.configurations import IDS
from tests.support.lying_store import Told, lying_store, random_death, random_lies
from tests.support.rivers import EMBEDDED, ENGINES, FOLDER, Losses, River, until
from tests.support.stores import BUCKET, Store, s3_store
from watersmeet.errors import WatersmeetError, is_retriable

_QUICK = {
    "watersmeet.running.runner.RETRY_S": 0.1,
    "watersmeet.engine.embedded.EmbeddedEngine.compact_every": 3,
    "watersmeet.engine.embedded.CLEAN_UP_EVERY": 4,
}
"""What comes sooner than it does otherwise."""

_CRASHES = (
    "watersmeet.bronze.fault_point",
    "watersmeet.silver.fault_point",
    "watersmeet.gold.fault_point",
)


FOR_GOOD = "not to be tried again, says "


class CrashError(WatersmeetError):
    """What a run ends with that is to crash."""


@contextmanager
def crashing(rng: random.Random) -> Iterator[None]:
    """Inside, a run crashes at some point between its commits, or comes to its end before."""
    left = rng.randint(1, 4)

    def crash(point: str) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise CrashError(point)

    with patch(rng.choice(_CRASHES), crash):
        yield


def _drawn(rng: random.Random, name: str) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if rng.random() < 0.5:
        more |= {"publish__late_topic": f"{name}-late"}
    if rng.random() < 0.3:
        more |= {"publish__corrections": {"topic": f"{name}-corrected", "within": "1d"}, **IDS}
    return more


def run_on(
    kafka: str,
    store: Store,
    folder: Path,
    seed: int,
    lies: str | None = None,
    runs: int = 3,
    lake: str = EMBEDDED,
) -> tuple[list[str], list[str]]:
    """What the runs on a store break that lies by a seed, and what happened."""
    rng = random.Random(f"stored/{seed}")
    name = f"stored-{seed}"
    more = _drawn(rng, name)
    river = River.make(kafka, folder, name, lake=lake, partitions=1, seed=seed, **more)
    river.config |= {"lake": f"s3://{BUCKET}/{name}"}
    text = random_lies(rng, rng.randint(8, 24)) if lies is None else lies
    if lies is None and (lake == FOLDER or rng.random() < 0.35):
        text += " " + " ".join(random_death(rng) for _ in range(rng.randint(1, 2)))
    ends = list[str]()
    with _quick(), lying_store(store.endpoint, text) as told:
        _write(river, store, told.endpoint)
        for _ in range(rng.randint(1, runs)):
            river.flow(records=rng.choice([3, 12]))
            is_apart = "dead" in text or lake == FOLDER
            ends += _run_apart(river, told) if is_apart else _run(river, rng)
    _write(river, store, store.endpoint)
    river.flow()
    river.finish()
    found = river.losses()
    problems = [] if found == Losses() else [f"{found}"]
    problems += [*river.broken_promises(), *(end for end in ends if end.startswith(FOR_GOOD))]
    return problems, [*ends, f"asked {told.asked}", *told.lies]


@contextmanager
def _quick() -> Iterator[None]:
    with ExitStack() as patched:
        for name, value in _QUICK.items():
            patched.enter_context(patch(name, value))
        yield


def _write(river: River, store: Store, endpoint: str) -> None:
    """The configuration asks for its lake at this address."""
    river.config["storage"] = store.storage() | {"AWS_ENDPOINT_URL": endpoint}
    if river.config["engine"] == ENGINES[FOLDER]:
        river.config["spark"] = settings_of(store) | {"spark.hadoop.fs.s3a.endpoint": endpoint}
    river.write()


def _run_apart(river: River, told: Told) -> Iterator[str]:
    """A run in a process of its own, which is killed where the store says so; how it ends."""
    run = river.run("--once")
    until(lambda: told.is_dead or run.process.poll() is not None, "the kill, or the end")
    if told.is_dead:
        run.kill()
        told.death.unlink()
        yield "killed"
    elif run.wait():
        said = run.said()
        yield f"{FOR_GOOD if 'Traceback' in said else ''}{said}"


def _run(river: River, rng: random.Random) -> Iterator[str]:
    """A run; how it ends where it does not come to its end."""
    try:
        with crashing(rng) if rng.random() < 0.3 else nullcontext():
            river.finish()
    except CrashError as crash:
        yield f"crash at {crash}"
    except WatersmeetError as error:
        passes = "" if is_retriable(error) and "\n" not in f"{error}" else FOR_GOOD
        yield f"{passes}{type(error).__name__}: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs on an object store that lies.")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--engine", choices=LAKES, default="embedded")
    parser.add_argument("--lies", help="instead of those of the seed")
    options = parser.parse_args(arguments)
    failed = list[int]()
    with brokered() as (kafka, folder), s3_store(_made(folder / "store")) as store:
        for seed in range(options.first, options.first + options.seeds):
            own = folder / f"seed-{seed}"
            try:
                problems, happened = run_on(
                    kafka, store, own, seed, options.lies, lake=LAKES[options.engine]
                )
            except Exception:
                problems, happened = [traceback.format_exc()], []
            say(f"seed {seed}: {'fails' if problems else 'good'}")
            for line in [*problems, *happened]:
                sys.stdout.write(f"  {line}\n")
            sys.stdout.flush()
            failed += [seed] if problems else []
            shutil.rmtree(own, ignore_errors=True)
    sys.stdout.write(f"{options.seeds} seeds, failed: {failed or 'none'}\n")
    return int(bool(failed))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
