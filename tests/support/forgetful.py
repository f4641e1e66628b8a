"""A folder that forgets: below it, a power cut takes what was not synced, as a disk does.

What each process of a run makes, names and syncs there is recorded by a small library that is
preloaded (`forgetful.c`): Python, delta-rs and the JVM all go through libc. It also stands still at
the n-th such call, which is where the power goes. Then `forget` makes of the folder what a power
cut there can have left: a file that was not synced is whole, empty, torn, or filled with zeros; a
name that was not synced in its folder is there, or not.

Or it is a disk that refuses: from the n-th request on, whoever wants to open, make, name or write
something gets an error, as of a full disk (`Refusal`).

Syncing a file says nothing of its name, as POSIX has it. What a folder had when its journal begins
is on the disk.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

LIBRARY = Path(__file__).with_suffix(".c")
HAS_COMPILER = shutil.which("cc") is not None
WHY = "the library that records what is synced needs a C compiler (`cc`)"

SECTOR = 512
"""Bytes that a disk writes all or none of."""

_STATE = "=QQQQQQQQ"


class Refusal(NamedTuple):
    """What is refused from the n-th request of these kinds on, and with which error."""

    kinds: int
    at: int
    error: int


OPENS, MAKES, WRITES, IN_PART = 1, 2, 4, 8
"""Kinds of requests: to open a file, to make or name one, to write; the first in part."""


@cache
def library() -> Path:
    """The compiled library."""
    target = Path(mkdtemp(prefix="watersmeet-forgetful-")) / "forgetful.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O2", "-o", target, LIBRARY, "-ldl"], check=True, timeout=60
    )
    return target


@dataclass
class _File:
    """A file or folder, whatever its name is."""

    is_synced: bool = False


@dataclass
class _Disk:
    """What is on the disk of a folder, as a journal says."""

    files: dict[str, _File] = field(default_factory=dict)
    """By path, what was written to since the journal begins."""
    unnamed: set[str] = field(default_factory=set)
    """Paths that their folder does not have on the disk yet."""
    former: dict[str, str] = field(default_factory=dict)
    """By such a path, the one that the file has on the disk."""

    def replay(self, what: str, path: str, other: str = "") -> None:
        """Take up a line of the journal."""
        if what == "F":
            self.files.setdefault(path, _File()).is_synced = True
            self._name_below(path)
        elif what in "OC":
            if path not in self.files or what == "O":
                self._new(path, is_there=path in self.files)
            self.files[path].is_synced = False
        elif what == "M":
            self._new(path, is_there=False)
            self.files[path].is_synced = True
        elif what in "RL":
            file = self.files.get(path, _File(is_synced=True))
            was_named = path not in self.unnamed
            self._gone(other)
            self.files[other] = file
            self.unnamed.add(other)
            if what == "R":
                if was_named:
                    self.former[other] = path
                elif (before := self.former.get(path)) is not None:
                    self.former[other] = before
                self._gone(path)
        else:
            self._gone(path)

    def _new(self, path: str, *, is_there: bool) -> None:
        if not is_there:
            self.files[path] = _File()
            self.unnamed.add(path)

    def _gone(self, path: str) -> None:
        self.files.pop(path, None)
        self.unnamed.discard(path)
        self.former.pop(path, None)

    def _name_below(self, folder: str) -> None:
        named = {path for path in self.unnamed if path.rpartition("/")[0] == folder}
        self.unnamed -= named
        for path in named:
            self.former.pop(path, None)


class ForgetfulFolder:
    """A folder whose files a power cut can take; `place`: where the journal is kept."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder = folder
        self._journal = place / "forgetful.journal"
        self._state = place / "forgetful.state"

    def environment(self, cut_at: int = 0) -> dict[str, str]:
        """The environment of a run whose power goes at the n-th call; a new journal begins."""
        self._journal.write_bytes(b"")
        self._state.write_bytes(struct.pack(_STATE, 0, cut_at, 0, 0, 0, 0, 0, 0))
        self._before = {str(path) for path in self.folder.rglob("*")} | {str(self.folder)}
        said = f"{self.folder}:{self._journal}:{self._state}"
        return {**os.environ, "LD_PRELOAD": str(library()), "WATERSMEET_FORGETFUL": said}

    def refuse(self, refusal: Refusal | None) -> None:
        """From now on the disk refuses, or no longer."""
        kinds, at, error = refusal or (0, 0, 0)
        with self._state.open("r+b") as state:  # processes have it in memory
            state.seek(struct.calcsize("=QQQ"))
            state.write(struct.pack("=QQQQQ", kinds, 0, at, error, 0))

    def _number(self, index: int) -> int:
        return int(struct.unpack(_STATE, self._state.read_bytes())[index])

    @property
    def calls(self) -> int:
        """How many calls there were."""
        return self._number(0)

    @property
    def is_cut(self) -> bool:
        """Whether the power is gone."""
        return bool(self._number(2))

    @property
    def requests(self) -> int:
        """How many requests there were of the kinds that a `Refusal` names."""
        return self._number(4)

    @property
    def refusals(self) -> int:
        """How many of them were refused."""
        return self._number(7)

    def _disk(self) -> _Disk:
        disk = _Disk({path: _File(is_synced=True) for path in self._before})
        for line in self._journal.read_text(errors="surrogateescape").splitlines():
            disk.replay(*line.split("\t"))
        return disk

    def not_durable(self) -> list[str]:
        """What a power cut could take now, below the folder, of what is there."""
        disk, found = self._disk(), []
        for path in sorted(self.folder.rglob("*")):
            text = str(path)
            if text in disk.unnamed:
                found.append(f"{path.relative_to(self.folder)}: its name")
            elif not disk.files.get(text, _File(is_synced=True)).is_synced:
                found.append(f"{path.relative_to(self.folder)}: what it has")
        return found

    def forget(self, rng: random.Random) -> list[str]:
        """Make of the folder what a power cut can have left; answers what is otherwise."""
        disk, done = self._disk(), []
        for path in sorted(self.folder.rglob("*"), key=lambda path: (len(path.parts), path)):
            text = str(path)
            if not path.exists():
                continue  # below a folder that is gone
            name = path.relative_to(self.folder)
            if text in disk.unnamed and rng.random() < 0.4:
                former = disk.former.get(text)
                if former is None:
                    _remove(path)
                elif Path(former).exists():
                    continue  # its name was taken again
                else:
                    path.rename(former)
                done.append(f"{name}: {'gone' if former is None else 'has its former name'}")
                continue
            is_synced = disk.files.get(text, _File(is_synced=True)).is_synced
            if path.is_file() and not is_synced and rng.random() < 0.7:
                done.append(f"{name}: {_spoil(path, rng)}")
        return done


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _spoil(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    cut = rng.randrange(len(content) + 1)
    if len(content) <= SECTOR:
        cut = rng.choice([0, len(content)])
    kinds: Mapping[str, bytes] = {
        "empty": b"",
        "torn": content[:cut],
        "zeros": b"\0" * len(content),
        "torn, then zeros": content[:cut] + b"\0" * (len(content) - cut),
    }
    kind = rng.choice([*kinds])
    path.write_bytes(kinds[kind])
    return kind
