"""Validity and messages of the rows of silver and of corrections, derived by the user's own
expressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.audit.verify_evidence import CorrectionRow, Row
from watersmeet.core.message import as_read, message_bytes, message_values
from watersmeet.core.types import TIME
from watersmeet.expressions.publish import Expressions
from watersmeet.lake.epochs import Epoch, Epochs


@dataclass(frozen=True)
class Validator:
    """Judge of rows of silver and of corrections by the `publish` of their epochs."""

    epochs: Epochs

    def evaluated(self, rows: pa.Table) -> pa.Table:
        """Return rows of silver, or alike, with `refusal` and `told`: why the predicate refuses
        them (null: it does not), and their message's value.
        """
        numbers = self.epochs.numbers_of(rows["batch"].to_numpy())
        rows_by_epoch = [np.flatnonzero(numbers == i) for i in range(len(self.epochs))]
        evaluated = [
            self._evaluated_in_epoch(rows.take(pa.array(row_numbers)), e)
            for row_numbers, e in zip(rows_by_epoch, self.epochs, strict=True)
            if len(row_numbers)
        ]
        if not evaluated:
            return self._evaluated_in_epoch(rows, self.epochs.current)
        return pa.concat_tables(evaluated).take(
            pa.array(np.argsort(np.concatenate(rows_by_epoch), kind="stable"))
        )

    def _evaluated_in_epoch(self, rows: pa.Table, epoch: Epoch) -> pa.Table:
        """Return `evaluated` for rows that the rules of one epoch have judged, or would judge."""
        expressions = Expressions.of(epoch.settings)
        stored = rows
        for name in ("event_time", "last_event_time"):
            stored = stored.set_column(
                stored.column_names.index(name), name, pc.multiply(rows[name], 1000).cast(TIME)
            )
        sources = epoch.settings.sources
        readable = as_read(stored, {name: source.value_type for name, source in sources.items()})
        if expressions.value is None:
            types = {name: source.read_type for name, source in sources.items()}
            told = _values(as_read(stored, types), list(sources))
        else:
            told = expressions.messages(readable).values
        refusal = expressions.refusals(readable)
        return rows.append_column("refusal", refusal).append_column("told", told)

    def right(self, row: Row, *, is_closed: bool = False) -> tuple[bool | None, str | None]:
        """Return what `valid` and `invalid_reason` of a row of silver must be.

        `is_closed`: a jump has closed what was valid.
        """
        if row.outcome.status != "timed_out":
            return (False, "reset") if row.is_finished else (None, None)
        valid, reason = self.validity(row)
        return (False, "reset") if is_closed and valid else (valid, reason)

    def validity(self, row: Row | CorrectionRow, header_bytes: int = 0) -> tuple[bool, str | None]:
        """Return what `valid` and `invalid_reason` must be where the rules judge a row.

        `header_bytes`: the size of the headers of its message beside those of `message_bytes`.
        """
        if isinstance(row, Row) and not row.outcome.parts:
            return False, "too_large"
        if row.refusal is not None:
            return False, row.refusal
        beside = len(row.key.encode()), len(row.tenant.encode())
        size = message_bytes(len(row.value or b""), *beside) + header_bytes
        fits = size <= self.epochs.of(row.batch).settings.publish.max_bytes
        return (True, None) if fits else (False, "too_large")


def _values(rows: pa.Table, sources: Sequence[str]) -> pa.ChunkedArray:
    """Return the default value of each row's message.

    Null for a row that can have none, since something in it is null.
    """
    try:
        return message_values(rows, sources)
    except ValueError:
        if rows.num_rows == 1:
            return pa.chunked_array([pa.nulls(1, pa.large_binary())])
    half = rows.num_rows // 2
    return pa.chunked_array(
        [*_values(rows[:half], sources).chunks, *_values(rows[half:], sources).chunks],
        pa.large_binary(),
    )
