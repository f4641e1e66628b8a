"""The table `journal`: what was decided about a lake, a row a decision, in the order of `seq`.

One append is one decision. The transaction version of its commit is its `seq`, so that of two
processes that decide at once, one writes nothing, reads again and decides anew. Whoever takes
layers says so here first (`OWNER`), and so no earlier owner of them decides anything afterwards.
Rows are never changed. What grows with the data has tables of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

import orjson

from watersmeet.errors import LeaseLostError, WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.commits import Append, Commit, suppress_conflict
from watersmeet.lake.table_reader import TableReader, Where, extreme
from watersmeet.lake.tables import JOURNAL, Table

IDENTITY: Final = "identity"
"""Facts that never change."""
MOVED: Final = "moved"
"""Facts in place of earlier ones: topics that hold the same records are others now."""
RULES: Final = "rules"
"""An epoch."""
BEGIN: Final = "begin"
"""A generation."""
CLOSED: Final = "closed"
"""All that follows for the generation before this one is done."""
SKIP: Final = "skip"
"""Offsets that Kafka no longer has were passed over."""
BASE: Final = "base"
"""A state of the merge is saved."""
FLOOR: Final = "floor"
"""Rows of tables before a base, or before these times, are to be deleted."""
ERASED: Final = "erased"
"""Rows of the table `erased` were added, or are to go, and which are the last ones then."""
REBUILD: Final = "rebuild"
"""What a rebuild repeats."""
OWNER: Final = "owner"
"""A process has taken layers."""

_APPLICATION: Final = "watersmeet-journal"
_ATTEMPTS: Final = 20


class Decision(NamedTuple):
    """A row of the journal; `token`: of the owner that decided, 0 without one."""

    seq: int
    kind: str
    generation: int | None
    body: Mapping[str, Any]
    decided_at: int
    token: int


def read_journal(reader: TableReader) -> list[Decision]:
    """Return every decision in order, but for those by which layers were taken."""
    if not reader.exists(JOURNAL):
        return []
    rows = reader.select(JOURNAL, list(Decision._fields), [[("kind", "!=", OWNER)]]).to_pylist()
    decisions = (Decision(**{**row, "body": orjson.loads(row["body"])}) for row in rows)
    return sorted(decisions, key=lambda decision: decision.seq)


def next_seq(reader: TableReader) -> int:
    """Return the number of the next decision."""
    return (extreme(reader, JOURNAL, "seq") or 0) + 1


def try_decide(
    reader: TableReader,
    append: Append,
    seq: int,
    kind: str,
    body: Mapping[str, Any],
    *,
    generation: int | None = None,
    token: int = 0,
) -> bool:
    """Append a decision with this number; return False if another one came first."""
    now_ms = time.time_ns() // 1_000_000
    row = seq, kind, generation, orjson.dumps(body).decode(), now_ms, token
    with suppress_conflict():
        append(JOURNAL, Table(JOURNAL, tables.DECISION).rows([row]), Commit(_APPLICATION, 0, seq))
    written = reader.select(JOURNAL, list(Decision._fields), [[("seq", "=", seq)]]).to_pylist()
    return bool(written == [dict(zip(Decision._fields, row, strict=True))])


def decide(
    reader: TableReader,
    append: Append,
    kind: str,
    body_of: Callable[[], Mapping[str, Any] | None],
    generation: int | None = None,
    *,
    token: int = 0,
    layers: Collection[str] = (),
) -> None:
    """Append a decision: of the owner that has a token and these layers, or (0) without an owner,
    for a lake that nobody else changes or that begins.

    `body_of` returns what it says after the decisions that there are, None if there is nothing to
    decide. Raises LeaseLostError, and decides nothing, if a later owner has taken one of these.
    """
    for _ in range(_ATTEMPTS):
        seq = next_seq(reader)  # read first: whoever takes a layer after this has this number
        later: Where = [[("kind", "=", OWNER), ("token", ">", token)]]
        taken = reader.select(JOURNAL, ["body"], later)["body"].to_pylist() if layers else []
        if any(not {*orjson.loads(each)["layers"]}.isdisjoint(layers) for each in taken):
            raise LeaseLostError(reader.lake.location)
        body = body_of()
        if body is None or try_decide(
            reader, append, seq, kind, body, generation=generation, token=token
        ):
            return
    raise WatersmeetError(
        f"the table {JOURNAL} could not be written to: others write to it all the time"
    )
