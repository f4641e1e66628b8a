"""Disks that are full, quotas that are used up, and processes without a file handle left: whatever
works on a lake ends with one sentence that says so, and once there is room a start goes on by
itself, and exactly.

`python -m tests.faults.full --seeds 50` tries so many seeds on a broker of its own; a failure is
said with its seed. All of it is in one process, below which `tests.support.forgetful` refuses what
is opened, made, named or written from the n-th request on; or the kernel does, beyond a limit of
handles.
"""

from __future__ import annotations

import argparse
import errno
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import tests.conftest  # noqa: F401  # quick starts
from tests.faults.command import brokered, say
from tests.faults.power import LAKES, drawn
from tests.support.commands import in_process
from tests.support.forgetful import IN_PART, MAKES, OPENS, WRITES, ForgetfulFolder, Refusal
from tests.support.lives import Life
from tests.support.rivers import Losses, River
from tests.support.topics import Access
from watersmeet.lake import tables

FULL = {
    "full": (MAKES | WRITES, errno.ENOSPC),
    "full in the midst of a write": (WRITES | IN_PART, errno.ENOSPC),
    "full, but files can be made": (WRITES, errno.ENOSPC),
    "over quota": (WRITES | IN_PART, errno.EDQUOT),
    "without handles": (OPENS, errno.EMFILE),
}
"""By name, what is refused, and with which error."""

FEW_HANDLES = "with few handles"
"""The kernel refuses more of them, to clients of Kafka, too."""

SAYS_SO = re.compile("the disk has no room left|this process may open no more files")


@contextmanager
def few_handles(more: int) -> Iterator[None]:
    """Inside, this process may have so many files open beside those that it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@dataclass
class FullDisk:
    """A lake whose disk refuses now and then."""

    river: River
    disk: ForgetfulFolder
    rng: random.Random
    told: list[str] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)

    def refuse(self, *command: str) -> bool:
        """Call a command whose disk refuses somewhere; answer whether it has ended well."""
        kind = self.rng.choice([*FULL, FEW_HANDLES])
        what = f"{' '.join(command)}: {kind}"
        at = int(self.requests.get(what, 300) ** self.rng.random())
        with few_handles(at // 10) if kind == FEW_HANDLES else self._refusing(kind, at):
            done = in_process(*command, "-c", self.river.file, cwd=self.river.folder)
        said = [line for line in done.stderr.splitlines() if line.startswith("watersmeet: ")]
        self.told.append(f"{what} at {at}: status {done.returncode} {' '.join(said)}")
        if kind != FEW_HANDLES:
            self.requests[what] = max(2, self.disk.requests)
        self.disk.refuse(None)
        assert "Traceback" not in done.stderr, done.stderr
        if done.returncode:
            assert len(said) == 1, done.stderr
            assert SAYS_SO.search(said[0]), done.stderr
        return done.returncode == 0

    @contextmanager
    def _refusing(self, kind: str, at: int) -> Iterator[None]:
        kinds, error = FULL[kind]
        self.disk.refuse(Refusal(kinds, at, error))
        yield


def runs(kafka: Access, disk: ForgetfulFolder, lake: str, rng: random.Random) -> Iterator[str]:
    """Runs, maintenance, reports and rebuilds whose disk refuses; what happened, and at the end
    what is wrong."""
    name = f"full-{time.monotonic_ns()}"
    seed, more = rng.randrange(10**6), drawn(rng, name)
    river = River.make(kafka, disk.folder / name, name, lake=lake, seed=seed, **more)
    full = FullDisk(river, disk, rng)
    others = [("maintain",), ("report", "--out", "page.html"), ("rebuild", "--into", "again")]
    for _ in range(rng.randint(2, 6)):
        river.flow(records=rng.choice([3, 12, 40]))
        command = ("run", "--once") if rng.random() < 0.7 else rng.choice(others)
        if command[0] != "run":
            river.finish()
            shutil.rmtree(river.folder / "again", ignore_errors=True)
        full.refuse(*command)
        yield full.told[-1]
    river.flow()
    river.finish()
    found = river.losses()
    problems = ([] if found == Losses() else [f"{found}"]) + river.broken_promises()
    assert not problems, problems


def changes(kafka: Access, disk: ForgetfulFolder, lake: str, rng: random.Random) -> Iterator[str]:
    """Commands that change a lake, and whose disk refuses; each is called again once there is
    room."""
    place = disk.folder / f"life-{time.monotonic_ns()}"
    life = Life.make(kafka, place, lake=lake, keep={"bronze": "5s", "silver": "5s"})
    full = FullDisk(life.river, disk, rng)
    forgotten = set[str]()
    for at in range(10_000, 10_000 * rng.randint(2, 4), 10_000):
        life.both(*[(f"k{at + n}", at + 10 * n) for n in range(5)], (None, at + 5000))
        life.run()
        opened = life.both((f"open{at}", at + 6000), (f"gone{at}", at + 6100))
        life.run()
        for command in rng.sample(
            [
                ("forget", f"gone{at}", "--apply"),
                ("reset", "--to", "earliest", "--yes"),
                ("evolve", "--apply"),
                ("maintain",),
            ],
            2,
        ):
            if command[0] == "evolve":
                life.configure("merge.timeout", f"{rng.randint(100, 900)}ms")
            is_done = full.refuse(*command)
            yield full.told[-1]
            if not is_done and rng.random() < 0.5 and command[0] != "evolve":
                life.run()
            life.call(*command)
            if command[0] == "forget":
                life.keyed -= {opened[1], opened[3]}
                forgotten.add(f"gone{at}")
    life.both((None, 10**6))
    life.run()
    assert life.keyed == life.sent_once()
    rows = life.river.reader.select(tables.bronze("tracking"), ["merge_key"])
    assert not forgotten.intersection(rows["merge_key"].to_pylist())
    life.check()


KINDS = {"runs": runs, "changes": changes}


def try_seeds(options: argparse.Namespace, kafka: str, disk: ForgetfulFolder) -> list[str]:
    """Try seeds in this process, below which is the library; answers the failed ones."""
    failed = list[str]()
    for seed in range(options.first, options.first + options.seeds):
        for kind in options.kind or KINDS:
            told = [f"seed {seed} of {kind} on {options.engine}"]
            rng = random.Random(f"full/{kind}/{seed}")
            try:
                told += KINDS[kind](kafka, disk, LAKES[options.engine], rng)
            except Exception:
                told.append(traceback.format_exc())
                failed.append(f"{kind} {seed}")
            say("\n  ".join(told))
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=LAKES, default="embedded")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--below", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.below is not None:
        kafka, folder = options.below
        disk = ForgetfulFolder(Path(folder, "disk"), Path(folder))
        with patch("watersmeet.lake.lease.SILENCE_S", 1.0):  # whoever has failed is still there
            failed = try_seeds(options, kafka, disk)
        sys.stdout.write(f"{options.seeds} seeds, failed: {failed or 'none'}\n")
        return int(bool(failed))
    with brokered() as (kafka, folder):
        return below(kafka, folder, *(sys.argv[1:] if arguments is None else arguments))


def below(kafka: str, folder: Path, *arguments: str) -> int:
    """Try seeds in a process of their own whose disk is below a folder."""
    (tmp := folder / "disk" / "tmp").mkdir(parents=True)
    environment = ForgetfulFolder(folder / "disk", folder).environment() | {"TMPDIR": str(tmp)}
    words = [sys.executable, "-m", "tests.faults.full", *arguments, "--below", kafka, str(folder)]
    return subprocess.run(words, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
