"""The shares of a batch of Kafka's offsets: of the partitions that have any, and of the tasks that
read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from watersmeet.kafka.reading import Range

Partition = TypeVar("Partition", str, int)

SMALLEST_SPLIT = 20_000
"""Smallest number of offsets in a part of a range that is split: with fewer, a task's own cost
would outweigh what it reads.
"""


def share(backlog: Mapping[Partition, int], limit: int) -> dict[Partition, int]:
    """Return how many offsets of each partition a batch of at most `limit` takes, in proportion to
    their backlog.

    Every partition with a backlog gets at least one, even where there are more such partitions than
    `limit`.
    """
    least = {p: min(waiting, 1) for p, waiting in backlog.items()}
    rest = sum(backlog.values()) - sum(least.values())
    room = min(max(limit - sum(least.values()), 0), rest)
    return {
        p: least[p] + (waiting - least[p]) * room // max(rest, 1) for p, waiting in backlog.items()
    }


def split_ranges(ranges: Sequence[Range], parallelism: int) -> list[Range]:
    """Return the ranges that are not empty, the large ones cut so that `parallelism` tasks have
    something to do.

    No part of a cut range has fewer than `SMALLEST_SPLIT` offsets.
    """
    share_of_task = max(sum(whole.size for whole in ranges) / max(parallelism, 1), 1)
    parts = []
    for whole in ranges:
        if whole.size == 0:
            continue
        count = max(min(math.ceil(whole.size / share_of_task), whole.size // SMALLEST_SPLIT), 1)
        cuts = [whole.from_offset + whole.size * i // count for i in range(count + 1)]
        parts += [
            Range(whole.topic, whole.partition, since, until) for since, until in pairwise(cuts)
        ]
    return parts
