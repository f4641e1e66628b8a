"""Open transactions of other producers: what lies behind the first one is invisible to readers of
committed messages.

Such a topic-partition is neither silent nor read to its end: its next record is written already.
"""

from __future__ import annotations

from collections.abc import Iterable

from watersmeet.core.plan import OpenTransaction
from watersmeet.core.times import LAST_EVENT_TIME_MS
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import first_times


def open_transactions(
    cluster: Cluster, topic: str, partitions: Iterable[int]
) -> tuple[dict[int, tuple[int, int]], dict[int, OpenTransaction]]:
    """Return the bounds of partitions (`Cluster.bounds_of`), and the oldest open transaction of
    each that has one.

    Raises what `Cluster` raises.
    """
    bounds, behind = cluster.bounds_and_unsettled(topic, partitions)
    firsts = {p: bounds[p][1] for p in behind}
    times = first_times(cluster.kafka, topic, firsts, cluster.timeout_s)
    valid_times = {p: time_ms for p, time_ms in times.items() if 0 <= time_ms <= LAST_EVENT_TIME_MS}
    return bounds, {p: OpenTransaction(firsts[p], behind[p], valid_times.get(p)) for p in behind}
