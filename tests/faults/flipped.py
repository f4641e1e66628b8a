"""Bits that flip in the files of a lake: either nothing comes of it, or a run or `verify --full`
names the table and the file; a wrong message is never sent.

`python -m tests.faults.flipped --seeds 50` tries so many seeds on a broker of its own; a failure is
said with its seed. Each is a lake, of which one bit in one file flips between two runs. What was
found is put back, as from a copy of the lake, and then all must be as if nothing had been.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from deltalake import DeltaTable

import tests.conftest  # noqa: F401  # quick starts
from tests.faults.command import brokered, say
from tests.faults.power import LAKES, drawn
from tests.support.cases import expected_messages
from tests.support.commands import in_process
from tests.support.correction_topic import corrections_seen
from tests.support.corrections import CorrectionsOfCases
from tests.support.rivers import EVEN_SMALL_BATCHES_IN_TASKS, FOLDER, Losses, River
from tests.support.topics import Access, consume, dead_letters, published
from watersmeet.lake.log_files import LOG
from watersmeet.run import LAYERS

KINDS = {
    "data": "*.parquet",
    "commit": f"{LOG}/0*.json",
    "checkpoint": f"{LOG}/*.checkpoint*.parquet",
    "last checkpoint": f"{LOG}/_last_checkpoint",
    "deletion vector": "deletion_vector_*.bin",
    "checksum": ".*.crc",
    "checksum of the log": f"{LOG}/.*.crc",
    "state": f"{LOG}/0*.crc",
}
"""Patterns of the files of a table, by kind."""


def files_of(table: Path, kind: str) -> list[Path]:
    """The files of a kind that a table has."""
    pattern = KINDS[kind]
    found = table.glob(pattern) if "/" in pattern else table.rglob(pattern)
    files = (file for file in found if ("/" in pattern) == (LOG in file.parts))
    return sorted(files, key=lambda file: (file.stat().st_mtime_ns, file))  # names are random


def flip(file: Path, bit: int) -> None:
    """Flip a bit of a file, which stays the same file."""
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        [byte] = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


@dataclass
class Flipped:
    """A lake of which a bit has flipped."""

    river: River
    rng: random.Random
    told: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, kafka: Access, folder: Path, lake: str, seed: int) -> Flipped:
        rng = random.Random(f"flipped/{lake}/{seed}")
        name = f"flipped-{lake}-{seed}-{time.monotonic_ns() % 10**6}"
        more = drawn(rng, name) | {"durable": True}
        river = River.make(kafka, folder, name, lake=lake, seed=seed, **more)
        if lake == FOLDER and rng.random() < 0.7:  # whose tasks and MERGE are Spark's
            river.program = EVEN_SMALL_BATCHES_IN_TASKS
        return cls(river, rng)

    @property
    def folder(self) -> Path:
        return Path(str(self.river.as_folder.lake))

    def fill(self) -> None:
        """Some runs, of which the last leaves something to be merged or published."""
        for _ in range(self.rng.randint(1, 3)):
            self.river.flow(records=self.rng.choice([3, 12, 40]))
            self.river.finish()
        self.river.flow()
        for layer in LAYERS[: self.rng.randint(1, 3)]:
            self.river.finish(layer)
        for table in self.tables():
            if self.rng.random() < 0.3:
                DeltaTable(table).create_checkpoint()

    def tables(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"*/{LOG}"))

    def flip_one(self) -> tuple[Path, int]:
        """A bit of a file of a table, by a kind that there is."""
        places = [(k, t) for k in KINDS for t in self.tables() if files_of(t, k)]
        kind = self.rng.choice(sorted({kind for kind, _ in places}))
        table = self.rng.choice([t for k, t in places if k == kind])
        file = self.rng.choice([f for f in files_of(table, kind) if f.stat().st_size])
        bit = self.rng.randrange(8 * file.stat().st_size)
        flip(file, bit)
        self.told.append(f"{kind}: bit {bit} of {file.relative_to(self.folder)}")
        return file, bit

    def call(self, *words: str) -> tuple[int, str]:
        """A command, its status, and what it has said."""
        if self.river.is_here:
            done = in_process(*words, "-c", self.river.file, cwd=self.river.folder)
            status, said = done.returncode, done.stdout + done.stderr
        else:
            run = self.river.run(*words[1:], command=words[0])
            status, said = run.wait(), run.said()
        self.told.append(f"{' '.join(words)}: status {status}")
        if status:
            self.told.append(said[-1500:])
        return status, said

    def try_it(self) -> list[str]:
        """Let a bit flip, and return what is wrong then."""
        river = self.river
        file, bit = self.flip_one()
        before, content = file.stat().st_ino, file.read_bytes()
        river.flow()
        for words in (("run", "--once"), ("verify", "--full")):
            status, said = self.call(*words)
            if status:
                break
        problems = self.wrong_messages()
        if not status:
            found = river.losses()
            return problems + ([] if found == Losses() else [f"silent, and {found}"])
        problems += self.not_named(file, said)
        if file.exists() and (file.stat().st_ino, file.read_bytes()) == (before, content):
            flip(file, bit)
            again, said = self.call("run", "--once")
            problems += [f"after it was put back: {said[-1500:]}"] if again else []
            if not again:
                found = river.losses()
                problems += [] if found == Losses() else [f"after it was put back: {found}"]
                problems += river.broken_promises()
        return problems

    def not_named(self, file: Path, said: str) -> list[str]:
        """What is missing in what a command has said of a flipped bit."""
        name = file.name.removeprefix(".").removesuffix(".crc").removesuffix(".json")
        [table, *_] = file.relative_to(self.folder).parts
        lacks = [each for each in (name, table) if each not in re.sub(r"\s+", "", said)]
        lacks += ["no Traceback"] if "Traceback" in said else []
        return [f"{lacks} is not said"] if lacks else []

    def wrong_messages(self) -> list[str]:
        """What topics have that they never should."""
        river, publish = self.river, self.river.settings.publish
        river._take_decisions()
        right = Counter(expected_messages(river.cases, river.inputs))
        seen = Counter(published(river.kafka, river.sink, river.partitions))
        wrong = [f"{n} times {message}" for message, n in (seen - right).items()]
        sources = {river.topic(name): name for name in river.inputs}
        for topic in publish.dead_letter_topics.values():
            letters = dead_letters(river.kafka, topic, river.partitions)
            for letter in letters:
                values = river.cases[letter.partition].values[sources[letter.source_topic]]
                if river.encode(values[letter.offset]) != letter.value:
                    wrong.append(f"{topic}: {letter}")
            if len(letters) != len({(e.source_topic, e.partition, e.offset) for e in letters}):
                wrong.append(f"{topic} has a letter twice")
        if publish.corrections is not None:
            topics = {source: river.topic(source) for source in river.inputs}
            model = CorrectionsOfCases.of(river.cases, publish, topics).messages()
            read = consume(river.kafka, publish.sequence_topics[1], river.partitions)
            for _, late, each in corrections_seen(read):
                row = (each.partition, each.key, each.seq, each.version, late, each.value)
                wrong += [] if row in model else [f"correction {row}"]
        return wrong


def flip_a_bit(kafka: Access, folder: Path, lake: str, seed: int) -> Flipped:
    """The life of a lake of which a bit flips; raises AssertionError where that has led to
    something wrong, or was not said rightly."""
    flipped = Flipped.begin(kafka, folder, lake, seed)
    try:
        flipped.fill()
        problems = flipped.try_it()
    except Exception as error:
        raise AssertionError(
            "\n".join([f"seed {seed} on {lake}:", *flipped.told, traceback.format_exc()])
        ) from error
    assert not problems, "\n".join([f"seed {seed} on {lake}:", *flipped.told, *problems])
    return flipped


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=LAKES, default="embedded")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1)
    options = parser.parse_args(arguments)
    failed = list[int]()
    # No power cut comes, and a disk may be slow.
    with brokered() as (kafka, folder), patch("os.fsync"):
        for seed in range(options.first, options.first + options.seeds):
            own = folder / f"seed-{seed}"
            try:
                flipped = flip_a_bit(kafka, own, LAKES[options.engine], seed)
                say(f"seed {seed}: good, {flipped.told[0]}\n  " + "\n  ".join(flipped.told[1:]))
            except AssertionError as failure:
                failed.append(seed)
                say(f"FAILED {failure}")
            shutil.rmtree(own, ignore_errors=True)
    sys.stdout.write(f"{options.seeds} seeds on {options.engine}, failed: {failed or 'none'}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
