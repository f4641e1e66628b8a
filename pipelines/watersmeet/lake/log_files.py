"""The files of a Delta log in a folder: their names, and the files that a commit names.

What is read here is what Delta's protocol says of them, for lakes whose tables are folders.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit
from uuid import UUID

import orjson

from watersmeet.errors import WatersmeetError

LOG: Final = "_delta_log"
"""The folder of a table's log, below the table's."""

LAST_CHECKPOINT: Final = "_last_checkpoint"
"""The file of a log that names its last checkpoint."""

LAST_VACUUM: Final = "_last_vacuum_info"
"""What Spark notes of a vacuum in a log, outside any commit; only a lite vacuum reads it."""

Action = Mapping[str, Any]
"""A line of a commit: one action by its name."""

_ENTRY: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\b.*\.(?:parquet|json)")
_OF_VERSION: Final = re.compile(r"\.?(\d{20})\.")

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


def version_of_entry(name: str) -> int | None:
    """Return the version whose commit a file of a log is, by its name; None for other files."""
    match = _ENTRY.fullmatch(name)
    return None if match is None else int(match[1])


def version_of_checkpoint(name: str) -> int | None:
    """Return the version whose checkpoint, or part of it, a file is; None for other files."""
    match = _CHECKPOINT.fullmatch(name)
    return None if match is None else int(match[1])


def version_of(name: str) -> int | None:
    """Return the version of which a file of a log says something; None for other files.

    Beside commits and checkpoints, those are the checksums that Spark and Hadoop keep of them.
    """
    match = _OF_VERSION.match(name)
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
