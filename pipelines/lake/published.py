"""The table `published`: where each partition's sequence stood after its last publication."""

from __future__ import annotations

from typing import Any

from pipelines.core.sequence import Tail
from pipelines.lake import tables
from pipelines.lake.questions import Questions, Where


def last_published(questions: Questions, sink: str | None = None, until_ms: int | None = None) -> dict[int, Tail]:
    """By partition the last message that was noted, of one sink or of all, up to a time (epoch ms); absent if there is none."""
    of_sink: list[tuple[str, str, Any]] = [] if sink is None else [("sink", "=", sink)]
    of_sink += [] if until_ms is None else [("committed_at", "<=", until_ms)]
    latest = questions.summary(tables.PUBLISHED, ["partition"], {"seq": ("max", "last_seq")}, [of_sink])
    last = dict(zip(latest["partition"].to_pylist(), latest["seq"].to_pylist(), strict=True))
    if not last:
        return {}
    names = ["partition", "last_seq", "last_event_time", "last_key", "sink_offset"]
    where: Where = [[*of_sink, ("last_seq", "in", sorted(set(last.values())))]]
    found = questions.select(tables.PUBLISHED, names, where)
    rows = zip(*(found[name].to_pylist() for name in names), strict=True)
    return {p: Tail(seq, *rest) for p, seq, *rest in rows if last[p] == seq}
