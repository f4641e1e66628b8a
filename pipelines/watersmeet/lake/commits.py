"""Metadata of commits: the application, the owner's fencing token, a number, and facts.

Delta skips a commit whose transaction version is not above the last one that it has seen of the
application in that table. So a batch is written once, and an earlier owner, whose token is smaller,
writes nothing. The facts are JSON in the commit's `userMetadata`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
import pyarrow as pa
from deltalake.exceptions import CommitFailedError

import watersmeet
from watersmeet.errors import TableConflictError
from watersmeet.lake import tables
from watersmeet.lake.table_reader import Histories, Version, walk
from watersmeet.lake.tables import APPLICATION, DELETING, RESETTING

UNREAD: Final = frozenset([DELETING, RESETTING])
"""Applications whose last commit nobody reads back."""

Append = Callable[[str, pa.Table, "Commit"], None]
"""Function that appends rows to a table in one commit, as an engine does.

It is silent where Delta skips the commit, and raises an error where another writer came first.
"""

WRITES: Final = frozenset(["WRITE", "MERGE", "DELETE", "UPDATE"])
"""Operations of an owner's commits, as Delta calls them.

Maintenance is not among them, whatever metadata its commits carry.
"""

_NUMBERS: Final = 1 << 32
_OWN: Final = frozenset(["application", "token", "number", "code_version"])


@dataclass(frozen=True)
class Commit:
    """A commit of an owner.

    - `token`: the fencing token of the owner's lease, 0 without one.
    - `number`: rises with each commit of an owner, from 1 on. 0 is a fence, which decides nothing
      (see `Owner.fence`).
    - `facts`: JSON values by name. The names of the other fields are taken.
    """

    application: str
    token: int
    number: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    code_version: str = watersmeet.__version__

    def __post_init__(self) -> None:
        if taken := _OWN & self.facts.keys():
            raise ValueError(f"facts of a commit cannot be named {', '.join(sorted(taken))}")

    @property
    def transaction_version(self) -> int:
        """The number that Delta compares.

        It is larger for a later owner, and for a later number of one owner.
        """
        return self.token * _NUMBERS + self.number

    @property
    def metadata(self) -> str:
        """The commit as a JSON object, for `userMetadata`."""
        own = {
            name: getattr(self, name) for name in ("application", "token", "number", "code_version")
        }
        return json.dumps({**own, **self.facts}, separators=(",", ":"))

    @property
    def is_fence(self) -> bool:
        """True where the commit decides nothing."""
        return self.number == 0

    @staticmethod
    def parse(metadata: str | None) -> Commit | None:
        """Return the commit with this `metadata`; None where the text is not a commit's."""
        try:
            fields = orjson.loads(metadata or "")
            own = fields["application"], fields["token"], fields["number"]
        except (ValueError, TypeError, LookupError):
            return None
        if [type(value) for value in own] != [str, int, int]:
            return None
        facts = {name: value for name, value in fields.items() if name not in _OWN}
        return Commit(*own, facts, str(fields.get("code_version")))


def last_commit(
    reader: Histories, table: str, application: str = APPLICATION
) -> tuple[Version, Commit] | None:
    """Return an application's last commit, fences included: (version, commit).

    None where the table's history has no such commit, or no longer.
    """
    of_application = (each for each in commits(reader, table) if each[1].application == application)
    return next(of_application, None)


def last_decision(
    reader: Histories, table: str, application: str = APPLICATION
) -> tuple[int, Commit] | None:
    """Return an application's last commit that is no fence: (number of its version, commit).

    Where the history no longer has it, the last fence repeats it. None where there is neither.
    """
    repeated: tuple[int, Commit] | None = None
    for version, commit in commits(reader, table):
        if commit.application != application:
            continue
        if not commit.is_fence:
            return version.number, commit
        decided = Commit.parse(commit.facts.get("decided"))
        if repeated is None and decided is not None:
            repeated = commit.facts["decided_in"], decided
    return repeated


def closed_by(reader: Histories) -> int:
    """Return the generation whose beginning has closed rows of silver since its last batch; 0
    without one.
    """
    decided = (commit for _, commit in commits(reader, tables.SILVER) if not commit.is_fence)
    last = next((each for each in decided if each.application in (RESETTING, APPLICATION)), None)
    return int(last.facts.get("generation", 0)) if last and last.application == RESETTING else 0


def commit_of(table: str, version: Version) -> Commit | None:
    """Return the owner's commit that made a version of a table; None where it was made otherwise.

    Its metadata alone does not tell: Delta gives a session's metadata to every commit made there,
    such as a compaction after a MERGE. So what the version did, and the facts that a batch has,
    count as well.
    """
    commit = Commit.parse(version.metadata) if version.operation in WRITES else None
    if commit is None or commit.is_fence or commit.application in UNREAD:
        return commit
    if table == tables.SILVER:
        is_batch = commit.application != APPLICATION or "batch" in commit.facts
    else:
        is_batch = not table.startswith(tables.bronze("")) or "ranges" in commit.facts
    return commit if is_batch else None


def commits(reader: Histories, table: str) -> Iterator[tuple[Version, Commit]]:
    """Yield the owners' commits to a table, fences included, the last one first."""
    for version in walk(reader, table):
        if (commit := commit_of(table, version)) is not None:
            yield version, commit


def ranges_fact(ranges: Mapping[int, tuple[int, int]]) -> list[list[int]]:
    """Return offset ranges `[from, until)` by partition as `[partition, from, until]` each."""
    return [[partition, since, until] for partition, (since, until) in sorted(ranges.items())]


def is_conflict(error: BaseException) -> bool:
    """Return True where a commit was refused because of another writer's commit.

    Reading the table again and retrying may succeed. Spark's error classes are those of
    `delta.exceptions`, which have no common base. Where that module has not been imported, no error
    is one of them.
    """
    module = sys.modules.get("delta.exceptions")
    spark_errors = () if module is None else tuple(getattr(module, name) for name in module.__all__)
    return isinstance(error, (CommitFailedError, TableConflictError, *spark_errors))


@contextmanager
def suppress_conflict() -> Iterator[None]:
    """End the block silently on a conflict. The caller then reads the table and tries again."""
    try:
        yield
    except Exception as error:
        if not is_conflict(error):
            raise
