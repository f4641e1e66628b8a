"""What a power cut leaves at the end of a table's log, in a lake that is a folder.

A commit that was not on the disk yet (`lake.durable`) may be left empty, torn, or filled with
zeros, or may name a file that is missing or not whole. Nothing relied on it, so a start moves it
aside, to `_delta_log/aside/`, with what else the log has of its version, and goes on: what it held
is made again. Only the end of a log is such a tail. A damaged commit before a whole one was relied
on; nobody can make it again, and the lake is refused.

Checkpoints repeat what commits say. One that is not whole is moved aside, too, as long as the
commits that it repeats are there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from watersmeet.errors import WatersmeetError
from watersmeet.lake.commits import WRITES, Commit
from watersmeet.lake.durable import RECENT, sync
from watersmeet.lake.location import Lake
from watersmeet.lake.log_files import (
    CHECKPOINT,
    ENTRY,
    LAST_CHECKPOINT,
    LOG,
    Action,
    actions_of,
    checksum_of,
    damaged,
    entry_of,
    files_named,
    has_form,
    is_checksum_whole,
    is_intact,
    is_sealed,
    names_in,
    version_of,
)

ASIDE: Final = "aside"
"""The folder of a log to which a start moves what a power cut has left."""

_PREFIX: Final = "torn-"
"""The beginning of the names there, so that no reader takes one for a commit."""

_LOOKS: Final = 10
"""Maximum number of looks at a log that others write to."""

_PARQUET: Final = b"PAR1"

log = logging.getLogger("watersmeet.lake")


@dataclass
class Tail:
    """What is at the end of a table's log, and is not whole."""

    log: Path
    flaws: dict[int, str] = field(default_factory=dict)
    """By version, what is wrong with its commit, the last one first."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """By file of the log that is or names a checkpoint, what is wrong with it."""
    hints: list[Path] = field(default_factory=list)
    """Files that are not whole, and that readers do without: they say again what others say."""
    is_whole_table: bool = False
    """True where no commit of the table is left, but what was moved aside."""

    @property
    def table(self) -> str:
        """The name of the table."""
        return self.log.parent.name

    @property
    def said(self) -> list[str]:
        """What is wrong, a sentence each."""
        commits = [
            f"the commit {entry_of(self.log, version)} {flaw}"
            for version, flaw in self.flaws.items()
        ]
        others = self.checkpoints.items()
        return commits + [f"the file {self.log / name} {flaw}" for name, flaw in others]

    def __bool__(self) -> bool:
        """Return True where something is to be moved aside."""
        return bool(self.flaws or self.checkpoints or self.hints)


def check_whole(lake: Lake) -> None:
    """Raise WatersmeetError where a start would have to move something aside; change nothing.

    For commands that only read. Delta takes an empty commit for one that changes nothing.
    """
    for tail in _tails(lake):
        if tail.said:
            raise WatersmeetError(
                f"{tail.said[0]}, as a power cut leaves it; nothing relies on it",
                fix="start a run: it moves that aside, makes it again, and goes on",
            )


def move_aside(lake: Lake) -> list[str]:
    """Move aside what a power cut has left at the end of the tables' logs.

    Return the tables that have no commit left: they are to be created again. To be called by
    whoever is to write the lake, before it is read. While the machine lives nobody sees a part of a
    commit, so what is found has no writer any more; of several starts one moves it.

    Raises WatersmeetError where a log is damaged before a whole commit.
    """
    folder = lake.folder
    if folder is None:
        return []
    tails = [*_tails(lake)]
    if any(tails):
        with _alone(folder):
            tails = [*_tails(lake)]
            for tail in filter(None, tails):
                _move(tail)
    return [tail.table for tail in tails if tail.is_whole_table]


def moved_aside(lake: Lake) -> list[str]:
    """Return what starts have moved aside, as paths below the lake's folder."""
    folder = lake.folder
    if folder is None:
        return []
    files = (file for name in lake.layout for file in (folder / name / LOG / ASIDE).glob("*"))
    return sorted(str(file.relative_to(folder)) for file in files)


def _tails(lake: Lake) -> Iterator[Tail]:
    folder = lake.folder
    if folder is None:
        return
    for name in lake.layout.keys() - lake.external_tables.keys():
        try:
            tail = _tail(folder / name / LOG)
        except IsADirectoryError as error:
            raise WatersmeetError(
                f"{error.filename} is a folder, where a file of the table's log belongs",
                fix="move it away, and start again",
            ) from None
        yield tail


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every network folder has locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _move(tail: Tail) -> None:
    first = min(tail.flaws, default=None)
    names = set(tail.checkpoints)
    if first is not None:
        versions = ((name, version_of(name)) for name in names_in(tail.log))
        names |= {name for name, version in versions if version is not None and version >= first}
    aside = tail.log / ASIDE
    for said in tail.said:
        log.warning("%s, as a power cut leaves it: moved to %s/", said, aside)
    if names:
        aside.mkdir(exist_ok=True)
    # The last one first: as long as the first commit is there, a start finds all others.
    for name in sorted(names, key=lambda name: (-(version_of(name) or 0), name)):
        _rename(tail.log / name, aside)
        checksum_of(tail.log / name).unlink(missing_ok=True)
    for hint in tail.hints:
        hint.unlink(missing_ok=True)
    sync([aside, tail.log, *(hint.parent for hint in tail.hints)])


def _rename(file: Path, aside: Path) -> None:
    name = f"{_PREFIX}{file.name.removeprefix('.')}"
    target, number = aside / name, 1
    while target.exists():
        number += 1
        target = aside / f"{name}.{number}"
    with suppress(FileNotFoundError):
        file.rename(target)


def _tail(log_folder: Path) -> Tail:
    """Return the end of a log. Raises WatersmeetError where it is damaged before the end.

    A living writer may add to the log meanwhile, or clean it up.
    """
    for _ in range(_LOOKS):
        names = names_in(log_folder)
        try:
            tail = _tail_of(log_folder, names)
        except (FileNotFoundError, WatersmeetError):
            if names == names_in(log_folder):
                raise
        else:
            if not tail or names == names_in(log_folder):
                return tail
    return _tail_of(log_folder, names_in(log_folder))


def _tail_of(log_folder: Path, names: Sequence[str]) -> Tail:
    tail = Tail(log_folder)
    entries = [v for name in names if (v := version_of(name, ENTRY)) is not None]
    if not entries:
        tail.is_whole_table = ASIDE in names
        return tail
    while entries:
        flaw = _flaw_of_newest(log_folder, entries[-1])
        if flaw is None:
            break
        tail.flaws[entries.pop()] = flaw
    tail.is_whole_table = not entries
    if entries:
        tail.hints += _hints_not_whole(log_folder, entries)
    base = _look_at_checkpoints(tail, names, entries)
    if entries:
        _check_rest(tail, entries, base)
    return tail


def _flaw_of_newest(log_folder: Path, version: int) -> str | None:
    """Return what is wrong with a commit with nothing whole behind it."""
    flaw, actions = _flaw(log_folder, version)
    entry = entry_of(log_folder, version)
    if is_sealed(entry):  # with its files it was on the disk, and others may rely on it
        if flaw := flaw or _altered(entry):
            raise damaged(entry, flaw)
        return None
    if flaw is None:
        flaw = "is torn" if has_form(entry) and not is_intact(entry) else _lack(actions)
    if flaw is None:
        for named in files_named(log_folder.parent, actions):
            size = named.path.stat().st_size if named.path.is_file() else None
            if size is None:
                flaw = f"names {named.path.name}, which is missing"
            elif size < named.size or (named.is_exact and size != named.size):
                flaw = f"names {named.path.name}, which has {size} of {named.size} bytes"
            elif named.path.suffix == ".parquet" and not _is_parquet(named.path):
                flaw = f"names {named.path.name}, which is no Parquet file"
    return flaw


def _flaw(log_folder: Path, version: int) -> tuple[str | None, Sequence[Action]]:
    text = entry_of(log_folder, version).read_bytes()
    if not text.strip(b"\0"):
        return "is filled with zeros" if text else "is empty", ()
    actions = actions_of(text)
    return (None, actions) if actions else ("is torn", ())


def _altered(entry: Path) -> str | None:
    """Return a flaw where a checksum, unless a power cut has torn it, has another content."""
    if is_checksum_whole(entry) and not is_intact(entry):
        return "does not have the content that was written, by its checksum"
    return None


def _lack(actions: Sequence[Action]) -> str | None:
    """Return a flaw where a commit lacks lines that others say it has: it was cut between two."""
    kinds = [kind for action in actions for kind in action]
    infos = [a["commitInfo"] for a in actions if isinstance(a.get("commitInfo"), dict)]
    info: Action = next(iter(infos), {})
    metadata = info.get("userMetadata")
    commit = Commit.parse(metadata) if isinstance(metadata, str) else None
    ids = [a["txn"]["appId"] for a in actions if "txn" in a]
    operation = info.get("operation")
    lacks = commit is not None and commit.application not in ids and operation in WRITES
    metrics = info.get("operationMetrics") if operation in _REWRITES else None
    if isinstance(metrics, Mapping):
        for kind, names in _REWRITTEN.items():
            said = [int(metrics[name]) for name in names if str(metrics.get(name)).isdigit()]
            lacks = lacks or kinds.count(kind) < max(said, default=0)
    return "is torn" if lacks else None


_REWRITES: Final = frozenset(["OPTIMIZE", "REORG"])
_REWRITTEN: Final = {
    "add": ("numFilesAdded", "numAddedFiles"),
    "remove": ("numFilesRemoved", "numRemovedFiles"),
}
"""Metrics of a compaction that say how many files it has added and removed."""


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            begins = file.read(len(_PARQUET)) == _PARQUET
            file.seek(-len(_PARQUET), os.SEEK_END)
            return begins and file.read() == _PARQUET
    except OSError:
        return False


def _hints_not_whole(log_folder: Path, entries: Sequence[int]) -> Iterator[Path]:
    """Yield what says again what the last commits and their files say, and is not whole.

    Where a checksum of Hadoop is wrong, it refuses the file; where there is none, it takes it.
    """
    for version in entries[-RECENT:]:
        entry = entry_of(log_folder, version)
        state = entry.with_suffix(".crc")  # Spark's checksum of the table's state
        named = files_named(log_folder.parent, actions_of(entry.read_bytes()) or ())
        for file in [entry, state, *(each.path for each in named)]:
            if not is_checksum_whole(file):
                yield checksum_of(file)
        with suppress(FileNotFoundError):
            if not actions_of(state.read_bytes()):
                yield state
                yield checksum_of(state)


def _look_at_checkpoints(tail: Tail, names: Sequence[str], entries: Sequence[int]) -> int | None:
    """Find checkpoints that are not whole, or have no commit; return the version of the last whole
    one.
    """
    newest = entries[-1] if entries else -1
    by_version = dict[int, list[str]]()
    for name in names:
        if (version := version_of(name, CHECKPOINT)) is not None:
            by_version.setdefault(version, []).append(name)
    base: int | None = None
    for version in sorted(by_version, reverse=True):
        if version > newest:
            flaw = "has no commit"
        elif not all(_is_whole(tail.log / name) for name in by_version[version]):
            flaw = "is not whole"
        else:
            base = version
            break
        tail.checkpoints |= dict.fromkeys(by_version[version], flaw)
    if LAST_CHECKPOINT in names:
        last = tail.log / LAST_CHECKPOINT
        named: int | None = None
        with suppress(ValueError, LookupError, TypeError):
            named = int(orjson.loads(last.read_bytes())["version"])
        if named is None:
            tail.hints += [last, checksum_of(last)]
        elif base is None or named > base or named not in by_version:
            tail.checkpoints[LAST_CHECKPOINT] = "names a checkpoint that is not there, or not whole"
    return base


def _is_whole(checkpoint: Path) -> bool:
    if not is_intact(checkpoint):
        return False
    if checkpoint.suffix == ".json":
        return bool(actions_of(checkpoint.read_bytes()))
    try:
        pq.read_metadata(checkpoint)
    except (pa.ArrowException, OSError):
        return False
    if (match := _PART.search(checkpoint.name)) is None:
        return True
    # It is one of several parts, all of which must be there.
    before, count = checkpoint.name[: match.start()], match[2]
    parts = [f"{before}.{n:010}.{count}.parquet" for n in range(1, int(count) + 1)]
    return all((checkpoint.parent / part).exists() for part in parts)


_PART: Final = re.compile(r"\.(\d{10})\.(\d{10})\.parquet$")


def _check_rest(tail: Tail, entries: Sequence[int], base: int | None) -> None:
    """Raise WatersmeetError where a commit is damaged that is before a whole one, and that no
    checkpoint has.
    """
    there = frozenset(entries)
    if base is None and 0 not in there and tail.checkpoints:
        raise damaged(tail.log / next(iter(tail.checkpoints)), "is not whole")
    for version in range(0 if base is None else base + 1, entries[-1]):
        entry = entry_of(tail.log, version)
        flaw = _flaw(tail.log, version)[0] if version in there else "is missing"
        if flaw := flaw or _altered(entry):
            raise damaged(entry, flaw)
