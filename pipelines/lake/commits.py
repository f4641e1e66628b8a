"""What a commit says about itself: its application, the owner's fencing token, a number, and facts.

Delta skips a commit whose transaction version is not above the last that it has seen of the application in that table: so a batch
is written once, and an earlier owner, whose token is smaller, writes nothing. The notes of a deciding commit (late, progress,
quarantine) bear its transaction version, so that they are written once, too. The facts are JSON in the commit's `userMetadata`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

import pipelines
from pipelines.core.inputs import topic_of
from pipelines.lake import tables
from pipelines.lake.questions import Questions, Version, walk

APPLICATION: Final = "watersmeet"

DELETING: Final = "watersmeet-delete"
"""Of the commits that delete what `keep` lets go, or erase a key: they decide no batch."""

EVOLVING: Final = "watersmeet-evolve"
"""Of the commits that begin a further epoch, which is a row of its own."""

RESETTING: Final = "watersmeet-reset"
"""Of the commits that follow from a jump, for the generation that it has ended."""

UNREAD: Final = frozenset([DELETING, EVOLVING, RESETTING])
"""Applications of which nobody asks what their last commit said."""

Append = Callable[[str, pa.Table, "Commit"], None]
"""Appends rows to a table in one commit, as an engine does: silent where Delta skips it, an error where another came first."""

_WRITES: Final = frozenset(["WRITE", "MERGE", "DELETE", "UPDATE"])
"""What a commit of an owner does, as Delta calls it. Maintenance is none, whatever metadata came along with it."""

_NUMBERS: Final = 1 << 32
_OWN: Final = frozenset(["application", "token", "number", "code_version"])


def bronze_application(source: str | None = None) -> str:
    """The application of bronze, or of one input's bronze, in tables that have more writers than it."""
    return f"{APPLICATION}-{source or 'bronze'}"


def application_of(name: str) -> str:
    """The application of bronze in the table of an input's source: each input of one that has several topics has its own."""
    return bronze_application(name) if topic_of(name) else APPLICATION


@dataclass(frozen=True)
class Commit:
    """One commit of an owner. `facts` are JSON values by name; the names of the other fields are taken.

    `token`: the fencing token of the owner's lease, 0 without one. `number`: rises with each commit of an owner, from 1 on; 0 is
    a fence, which decides nothing (see `Owner.fence`).
    """

    application: str
    token: int
    number: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    code_version: str = pipelines.__version__

    def __post_init__(self) -> None:
        if taken := _OWN & self.facts.keys():
            raise ValueError(f"facts of a commit cannot be named {', '.join(sorted(taken))}")

    @property
    def transaction_version(self) -> int:
        """What Delta compares: larger for a later owner, and for a later number of one owner."""
        return self.token * _NUMBERS + self.number

    @property
    def metadata(self) -> str:
        """The commit as a JSON object, for `userMetadata`."""
        own = {name: getattr(self, name) for name in ("application", "token", "number", "code_version")}
        return json.dumps({**own, **self.facts}, separators=(",", ":"))

    @property
    def is_fence(self) -> bool:
        """Whether the commit decides nothing."""
        return self.number == 0

    @staticmethod
    def parse(metadata: str | None) -> Commit | None:
        """The commit whose `metadata` this is; None for a text that is none."""
        try:
            said = json.loads(metadata or "")
            own = said["application"], said["token"], said["number"]
        except (ValueError, TypeError, LookupError):
            return None
        if [type(value) for value in own] != [str, int, int]:
            return None
        facts = {name: value for name, value in said.items() if name not in _OWN}
        return Commit(*own, facts, str(said.get("code_version")))


def last_commit(questions: Questions, table: str, application: str = APPLICATION) -> tuple[Version, Commit] | None:
    """The last commit of an application that the table's history still knows, and the version that it made; a fence, too."""
    return next(_commits(questions, table, application), None)


def last_decision(questions: Questions, table: str, application: str = APPLICATION) -> tuple[int, Commit] | None:
    """The last commit of an application that is no fence, and the version of the table that it made.

    Where the history has forgotten it, the last fence tells.
    """
    told: tuple[int, Commit] | None = None
    for version, commit in _commits(questions, table, application):
        if not commit.is_fence:
            return version.number, commit
        decided = Commit.parse(commit.facts.get("decided"))
        if told is None and decided is not None:
            told = commit.facts["decided_in"], decided
    return told


def unnoted_commit(questions: Questions, source: str) -> Commit | None:
    """Return the last commit of an input to bronze, where `quarantine` lacks its refused records yet; else None."""
    last = last_decision(questions, tables.bronze(source), application_of(source))
    if last is None or not last[1].facts["refused"]:
        return None  # there is nothing to note, and quarantine's history need not be searched
    noted = last_commit(questions, tables.QUARANTINE, bronze_application(source))
    is_noted = noted is not None and noted[1].transaction_version >= last[1].transaction_version
    return None if is_noted else last[1]


def commit_of(table: str, version: Version) -> Commit | None:
    """Return the owner's commit that made a version of a table; None where it was made otherwise.

    That is told by what the version did and by the facts that a batch has, and not by its metadata alone: Delta
    gives a session's metadata to every commit made there, such as a compaction behind a MERGE.
    """
    commit = Commit.parse(version.metadata) if version.operation in _WRITES else None
    if commit is None or commit.is_fence or commit.application in UNREAD:
        return commit
    of_batch = "batch" if table == tables.SILVER else "ranges" if table.startswith(tables.bronze("")) else None
    return commit if of_batch is None or of_batch in commit.facts else None


def _commits(questions: Questions, table: str, application: str) -> Iterator[tuple[Version, Commit]]:
    for version in walk(questions, table):
        commit = commit_of(table, version)
        if commit is not None and commit.application == application:
            yield version, commit


def ranges_fact(ranges: Mapping[int, tuple[int, int]]) -> list[list[int]]:
    """Offset ranges `[from, until)` by partition as a fact: `[partition, from, until]` each."""
    return [[partition, since, until] for partition, (since, until) in sorted(ranges.items())]


def ranges_of(fact: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """The ranges of which `ranges_fact` made the fact."""
    return {partition: (since, until) for partition, since, until in fact}
