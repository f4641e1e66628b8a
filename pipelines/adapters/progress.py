"""The `progress` table: how far silver is, and the plan of its last batch, so that a start can complete it; `versions`: what
became of each batch; and what a commit to silver says of itself.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pipelines
from pipelines import tables
from pipelines.adapters.lake import Lake, wall_clock_ms
from pipelines.core.plan import BatchPlan, OffsetRange, TopicPartition
from pipelines.settings import Settings

_RECENT = 20
"""After a batch, a start adds a few commits of its own to silver, and maintenance another."""


def write_progress(lake: Lake, settings: Settings, plan: BatchPlan) -> None:
    """One row for every topic-partition, so that the last batch alone says where all of them stand. A replay is a no-op."""
    now = wall_clock_ms()
    rows = [
        (
            plan.batch,
            tp.source,
            settings.sources[tp.source].topic,
            tp.partition,
            done.from_offset,
            done.until_offset,
            done.head,
            plan.clocks.get(tp.partition),
            now,
            done.position,
            plan.reset,
        )
        for tp, done in plan.ranges.items()
    ]
    lake.append_rows(rows, tables.PROGRESS, batch=plan.batch)


def read_last_batch(lake: Lake) -> BatchPlan | None:
    """The last batch that `progress` knows, as it was planned; whether it has late records is not kept, so: perhaps."""
    rows = lake.rows(
        "SELECT batch, source, `partition`, from_offset, until_offset, position, head, clock, reason FROM {progress} "
        "WHERE batch >= (SELECT MAX(batch) FROM {progress}) - 1 ORDER BY batch"
    )
    if not rows:
        return None
    last = rows[-1][0]
    before, ranges, clocks, reset = {}, {}, {}, None
    for batch, source, partition, since, until, position, head, clock, reason in rows:
        tp = TopicPartition(source, partition)
        if batch < last:
            before[tp] = position
            continue
        ranges[tp] = OffsetRange(since, until, before.get(tp), position, head)
        if clock is not None:
            clocks[partition] = clock
        reset = reason
    return BatchPlan(last, ranges, clocks, has_late=True, reset=reset)


def metadata(settings: Settings, plan: BatchPlan) -> str:
    """What silver's commit of a batch says in its history (`userMetadata`): a JSON object with the batch, `[from, until)` of the
    offsets by source and partition, the clocks (epoch ms) by partition, the configuration's digest, and the version of the code.
    """
    offsets: dict[str, dict[int, list[int]]] = {}
    for tp, done in plan.ranges.items():
        offsets.setdefault(tp.source, {})[tp.partition] = [done.from_offset, done.until_offset]
    facts = {"batch": plan.batch, "offsets": offsets, "clocks": plan.clocks, "configuration": settings.digest}
    return json.dumps({**facts, "code_version": pipelines.__version__, **({"reset": plan.reset} if plan.reset else {})})


def write_version(lake: Lake, plan: BatchPlan) -> None:
    """Keeps which version of silver the batch made, once; nothing where the log does not know it any more."""
    for limit in (1, _RECENT):  # the last commit, or where a start came between, one of the last
        for version in lake.history(tables.SILVER, limit):
            said = _said(version.said)
            if said.get("batch") == plan.batch:
                facts = version.number, version.committed_at, said.get("configuration"), said.get("code_version")
                lake.append_rows([(plan.batch, *facts)], tables.VERSIONS, batch=plan.batch)
                return


def _said(text: str | None) -> dict[str, Any]:
    with suppress(ValueError, TypeError):
        said = json.loads(text or "")
        return said if isinstance(said, dict) else {}
    return {}
