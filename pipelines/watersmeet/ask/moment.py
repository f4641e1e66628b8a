"""The moment of a lake that is asked about: a version of silver, or a time."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from watersmeet.core.times import epoch_ms
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.progress import last_batch
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.table_reader import VersionGoneError


class Moment(NamedTuple):
    """A moment: silver's version (None: before the first one), its last batch (-1: none), and the
    time (epoch ms).
    """

    version: int | None
    batch: int
    at: int


def moment(snapshot: Snapshot, as_of: int | datetime, option: str) -> tuple[Snapshot, Moment]:
    """Return the lake as of a version of silver, or a time.

    Raises ConfigurationError, which names the `option`, where silver has no such version yet, and
    VersionGoneError where its log has forgotten it.
    """
    version: int | None
    if isinstance(as_of, datetime):
        at = epoch_ms(as_of)
        version = snapshot.version_at(tables.SILVER, at)
        earlier = snapshot.as_of(at)
    else:
        version = as_of
        newest = snapshot.version(tables.SILVER)
        if version > newest:
            raise ConfigurationError(
                f"silver has no version {version} yet",
                where=option,
                fix=f"the newest is {newest}",
            )
        commit = snapshot.history(tables.SILVER, newest - version + 1)[-1]
        if commit.number != version:
            raise VersionGoneError(tables.SILVER, version)
        at = commit.committed_at_ms
        earlier = snapshot.as_of(at, version)
    last = last_batch(earlier) if earlier.exists(tables.SILVER) else None
    return earlier, Moment(version, -1 if last is None else last.batch, at)
