"""The files of a Delta log in a folder: their names, the files that a commit names, and checksums
beside the files of tables in the form of Hadoop's local file system.

Spark writes and checks checksums by itself: a file `.NAME.crc` with the CRC-32 of each piece of the
file `NAME`, and how many bytes a piece has. delta-rs does neither. So whoever makes a commit
durable gives its files checksums afterwards (`seal`), and what delta-rs reads is compared with them
first.

Spark's pieces have 512 bytes, and Python takes seven times as long for those as for larger ones;
Hadoop takes whatever size the file says. Pieces of `PIECE` bytes also say that the file was on the
disk before it had a checksum, so that no power cut can have torn it.
"""

from __future__ import annotations

import base64
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit
from uuid import UUID

import orjson

from watersmeet.errors import TableError, WatersmeetError

LOG: Final = "_delta_log"
"""The folder of a table's log, below the table's."""

LAST_CHECKPOINT: Final = "_last_checkpoint"
"""The file of a log that names its last checkpoint."""

LAST_VACUUM: Final = "_last_vacuum_info"
"""What Spark notes of a vacuum in a log, outside any commit; only a lite vacuum reads it."""

Action = Mapping[str, Any]
"""A line of a commit: one action by its name."""

ENTRY: Final = re.compile(r"(\d{20})\.json")
CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\b.*\.(?:parquet|json)")
_OF_VERSION: Final = re.compile(r"\.?(\d{20})\..*")

_Z85: Final = (
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)
_B85: Final = (
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
)
_AS_B85: Final = str.maketrans(_Z85, _B85)
_UUID_LETTERS: Final = 20


class Named(NamedTuple):
    """A file that a commit has added, and how many bytes it has, or has at least."""

    path: Path
    size: int
    is_exact: bool = True


def entry_name(version: int) -> str:
    """Return the name that the file of a commit has in its log."""
    return f"{version:020}.json"


def entry_of(log: Path, version: int) -> Path:
    """Return the file of a commit in a log."""
    return log / entry_name(version)


def names_in(log: Path) -> list[str]:
    """Return the names of a log's files in order; none where there is no log."""
    return sorted(path.name for path in log.iterdir()) if log.is_dir() else []


def version_of(name: str, of: re.Pattern[str] = _OF_VERSION) -> int | None:
    """Return the version of which a file of a log says something; None for other files.

    `of`: of commits (`ENTRY`), or of checkpoints and their parts (`CHECKPOINT`) alone. Beside
    those, there are the checksums that Spark and Hadoop keep of them.
    """
    match = of.fullmatch(name)
    return None if match is None else int(match[1])


def checksum_of(path: Path) -> Path:
    """Return the file in which Hadoop's local file system keeps the checksums of another one."""
    return path.with_name(f".{path.name}.crc")


def actions_of(text: bytes) -> Sequence[Action] | None:
    """Return the actions of a commit; None where the text is not one JSON object a line."""
    try:
        actions = [orjson.loads(line) for line in text.splitlines()]
    except ValueError:
        return None
    return actions if all(isinstance(action, dict) for action in actions) else None


def files_named(table: Path, actions: Sequence[Action]) -> Iterator[Named]:
    """Yield the files that a commit has added to a table's folder: data, deletion vectors, changes.

    Those in an object store, of a table that was cloned from there, are left out.
    """
    for action in actions:
        for kind in ("add", "cdc"):
            added = action.get(kind)
            if isinstance(added, dict) and (path := _local(str(added["path"]))) is not None:
                yield Named(table / path, int(added["size"]))
                vector = added.get("deletionVector")
                if isinstance(vector, dict) and (file := _vector(table, vector)) is not None:
                    end = int(vector.get("offset") or 0) + int(vector["sizeInBytes"])
                    yield Named(file, end, is_exact=False)  # it may have several vectors


def _vector(table: Path, vector: Mapping[str, Any]) -> Path | None:
    where = str(vector["pathOrInlineDv"])
    if vector["storageType"] == "u":
        prefix, encoded = where[:-_UUID_LETTERS], where[-_UUID_LETTERS:]
        name = UUID(bytes=base64.b85decode(encoded.translate(_AS_B85)))
        return table / prefix / f"deletion_vector_{name}.bin"
    return _local(where) if vector["storageType"] == "p" else None


def _local(uri: str) -> Path | None:
    """Return the path of a file, relative or not; None for a file elsewhere."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None


def damaged(entry: Path, flaw: str) -> WatersmeetError:
    """Return the error of a log with a commit that is damaged, and that others rely on."""
    return WatersmeetError(
        f"the log of table {entry.parent.parent.name} is damaged: {entry} {flaw}",
        fix=(
            "put that file back from a copy of the lake, or begin a new lake elsewhere (with "
            "`kafka.start: sink` it takes up the sink)"
        ),
    )


PIECE: Final = 64 * 1024

_FORM: Final = b"crc\0"
_OURS: Final = _FORM + PIECE.to_bytes(4, "big")
_HEADER: Final = len(_OURS)
_SUM: Final = 4
_LARGEST: Final = 1024 * 1024
"""Number of bytes that a piece has at most: it is in memory as a whole."""


def seal(files: Iterable[Path]) -> list[Path]:
    """Write the checksums of files that are on the disk and have none, and return where they are.

    Those of commits take the place of Spark's, which it writes before they are on the disk. A file
    stays without one where the disk does not take it.
    """
    return [*filter(None, map(_seal, files))]


def _seal(file: Path) -> Path | None:
    checksum = checksum_of(file)
    is_commit = version_of(file.name, ENTRY) is not None
    if is_sealed(file) if is_commit else checksum.exists():
        return None
    draft = checksum.with_name(f".{file.name}.{os.getpid()}.crc")  # nobody sees a part of it
    try:
        draft.write_bytes(_OURS + _sums(file, PIECE))
        return draft.replace(checksum)
    except OSError:
        draft.unlink(missing_ok=True)
        return None


def is_sealed(file: Path) -> bool:
    """Return True where `seal` has written the checksum of a file, so that it was on the disk."""
    return _said(file)[:_HEADER] == _OURS


def is_intact(file: Path) -> bool:
    """Return True where a file has the content that its checksum says, or there is none."""
    try:
        said = checksum_of(file).read_bytes()
        piece = _piece_of(said)
        return 0 < piece <= _LARGEST and said[_HEADER:] == _sums(file, piece)
    except FileNotFoundError:
        return True


def has_form(file: Path) -> bool:
    """Return True where the checksum of a file begins as one, which no power cut has emptied."""
    return _said(file)[: len(_FORM)] == _FORM


def is_checksum_whole(file: Path) -> bool:
    """Return True where a file has no checksum, or one that is for a file of its size."""
    try:
        said, size = checksum_of(file).read_bytes(), file.stat().st_size
    except FileNotFoundError:
        return True
    if not (piece := _piece_of(said)):
        return False
    sums = [said[begin : begin + _SUM] for begin in range(_HEADER, len(said), _SUM)]
    return len(said) == _HEADER + _SUM * -(-size // piece) and bytes(_SUM) not in sums


def _piece_of(said: bytes) -> int:
    """Return how many bytes a piece has; 0 where it is no checksum of Hadoop's form."""
    return int.from_bytes(said[len(_FORM) : _HEADER], "big") if said.startswith(_FORM) else 0


def _said(file: Path) -> bytes:
    try:
        return checksum_of(file).read_bytes()
    except FileNotFoundError:
        return b""


def _sums(file: Path, piece: int) -> bytes:
    sums = bytearray()
    with file.open("rb") as opened:
        while content := opened.read(piece * -(-PIECE // piece)):
            view = memoryview(content)
            for begin in range(0, len(view), piece):
                sums += zlib.crc32(view[begin : begin + piece]).to_bytes(_SUM, "big")
    return bytes(sums)


def damaged_file(table: str, file: str) -> TableError:
    """Return the error of a table with a file that has another content than was written."""
    return TableError(
        f"the file {file} is damaged: it does not have the content that was written, by its "
        "checksum",
        where=table,
        fix=(
            "put that file and its `.crc` back from a copy of the lake, or begin a new lake "
            "elsewhere (with `kafka.start: sink` it takes up the sink); then look at the disk"
        ),
    )
