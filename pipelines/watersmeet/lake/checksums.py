"""Checksums beside the files of tables in a folder, in the form of Hadoop's local file system.

Spark writes and checks them by itself: a file `.NAME.crc` with the CRC-32 of each piece of the file
`NAME`, and how many bytes a piece has. delta-rs does neither. So whoever makes a commit durable
gives its files checksums afterwards (`seal`), and what delta-rs reads is compared with them first.

Spark's pieces have 512 bytes, and Python takes seven times as long for those as for larger ones;
Hadoop takes whatever size the file says. Pieces of `PIECE` bytes also say that the file was on the
disk before it had a checksum, so that no power cut can have torn it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from watersmeet.errors import TableError
from watersmeet.lake.log_files import checksum_of, version_of_entry

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
    is_commit = version_of_entry(file.name) is not None
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
