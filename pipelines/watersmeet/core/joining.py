"""Rule 4: the choice of the open merge record that a record joins, or of a new one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from watersmeet.core.columns import MAX_TIME, NULL_TIME, Int64s, in_groups, times_ms
from watersmeet.core.plan import Rules
from watersmeet.core.positions import Positioned


class OpenRecordTimes(NamedTuple):
    """First and last event times of open merge records, and until when they can be joined (ms)."""

    first: Int64s
    last: Int64s
    due: Int64s

    @classmethod
    def of(cls, rows: pa.Table, rules: Rules) -> OpenRecordTimes:
        """Return the times of open rows of silver."""
        first = times_ms(rows["event_time"])
        last = times_ms(rows["last_event_time"])
        return cls(first, last, rules.due(first, last))

    def by_key(self, keys: Int64s, count: int) -> OpenRecordTimes:
        """Return these times by number of a key (of `count`), `MAX_TIME` without an open record."""
        times = OpenRecordTimes(*(np.full(count, MAX_TIME) for _ in self._fields))
        for column, own in zip(times, self, strict=True):
            column[keys] = own
        return times


def session_index(
    records: Positioned, record_keys: Int64s, opened: OpenRecordTimes, rules: Rules
) -> Int64s:
    """Return, for each record, which merge record of its key it belongs to.

    0 is the key's open record, or its first new one where it has none. `record_keys`: the number of
    each record's key. `opened`: by key.

    Nearly every key has one merge record in a batch. That is known without a look at its records
    one by one where none can open a second one, in two cases:
    - the last position is within the gap of the first event time;
    - each position is within the gap of the record before it, and within the longest stay of the
      first event time.

    For the other keys, rule 4 is applied record by record, in order of position.
    """
    nth = np.zeros(len(record_keys), np.int64)
    if not len(nth):
        return nth
    order, begins = in_groups(record_keys, records.positions)
    ends = np.append(begins[1:], len(order))
    keys = record_keys[order[begins]]
    times = records.times[order]
    positions = records.positions[order]
    first = np.minimum(opened.first[keys], np.minimum.reduceat(times, begins))
    splits = positions[ends - 1] > rules.due(first, first)
    if splits.any():
        before = np.concatenate([[NULL_TIME], times[:-1]])
        before[begins] = opened.last[keys]
        holds = (before == MAX_TIME) | (
            positions <= rules.due(np.repeat(first, ends - begins), before)
        )
        splits &= ~np.logical_and.reduceat(holds, begins)
    for group in np.flatnonzero(splits):
        key = keys[group]
        number = -1
        since = 0
        until = 0
        due = NULL_TIME
        if opened.first[key] != MAX_TIME:
            number = 0
            since = int(opened.first[key])
            until = int(opened.last[key])
            due = int(opened.due[key])
        for i in range(begins[group], ends[group]):
            time = int(times[i])
            if due >= positions[i]:
                since = min(since, time)
                until = max(until, time)
            else:
                number = number + 1
                since = time
                until = time
            due = rules.window.due(since, until)
            nth[order[i]] = number
    return nth
