"""What happens in a run, as its observers are told: the metrics, the consumer groups, the lineage.

An event is told after the fact, from the thread in which it happened, and holds only what a layer knows anyway. An observer must
be quick, safe to call from several threads, and raise nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pipelines.core.plan import OpenTransaction, TopicPartition
from pipelines.core.tenants import TenantClocks

Counts: TypeAlias = Mapping[tuple[str, str], int]
"""Records by outcome and, where they were refused, reason (else empty)."""


@dataclass(frozen=True)
class OwnerChanged:
    """This process holds the lease of some layers, with this fencing token, or does not any more."""

    layers: Sequence[str]
    token: int
    is_owner: bool


@dataclass(frozen=True)
class StepDone:
    """A layer has done a step of a batch."""

    layer: str
    step: str
    seconds: float


@dataclass(frozen=True)
class Committed:
    """A table has a new commit of this process, one that decides."""

    table: str


@dataclass(frozen=True)
class Reached:
    """Up to which offset (exclusive) bronze has read some topic-partitions."""

    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True)
class Handled:
    """What became of the records that a layer has handled in a batch, by the topic from which, or to which, they are."""

    layer: str
    topics: Mapping[str, Counts]


class SourceStanding(NamedTuple):
    """Where the merge stands in a topic-partition: the next offset, the position and the head (ms), and the source's state."""

    next_offset: int
    position: int | None
    head: int | None
    state: str


@dataclass(frozen=True)
class Standing:
    """Where the merge stands, after a batch or where there was nothing to merge. `clocks`: by partition, in ms; `tenants`: those
    of tenants, where there are some.
    """

    clocks: Mapping[int, int]
    sources: Mapping[TopicPartition, SourceStanding]
    tenants: TenantClocks | None = None


@dataclass(frozen=True)
class Published:
    """The number of the last message of each partition of the sink that holds one."""

    topic: str
    sequences: Mapping[int, int]


class TenantsSampled(NamedTuple):
    """How many records wait for their tenants' clocks, how many tenants have something open or waiting, and how far the slowest
    of them is behind the clock of its partition (ms).
    """

    waiting_rows: int
    tenants: int
    lag_ms: int


@dataclass(frozen=True)
class Sampled:
    """What a run asks now and then: the first offset and the exclusive end offset of each topic-partition in Kafka; how many
    merge records are open, how many by partition are never published (`behind_sink`), and how tenants stand (None: as before, or
    there are none); and the oldest open transaction of each topic-partition that has one.
    """

    bounds: Mapping[TopicPartition, tuple[int, int]]
    open_rows: int | None
    tenants: TenantsSampled | None = None
    transactions: Mapping[TopicPartition, OpenTransaction] = field(default_factory=dict)
    behind_sink: Mapping[int, int] | None = None


@dataclass(frozen=True)
class Behind:
    """How many offsets of each partition of a topic a layer has not passed, as far as it has looked."""

    layer: str
    topic: str
    records: Mapping[int, int]


@dataclass(frozen=True)
class Failed:
    """Something failed, for a reason of this kind (`errors.kind_of`), and is tried again or ends the run."""

    kind: str
    is_retried: bool


@dataclass(frozen=True)
class Checked:
    """A suite of expectations was checked on a table; `failed` of them are not met."""

    suite: str
    table: str
    failed: int


Event: TypeAlias = (
    OwnerChanged | StepDone | Committed | Reached | Handled | Standing | Published | Sampled | Behind | Failed | Checked
)
Observer: TypeAlias = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The observer of a run that nobody observes."""


def all_of(observers: Sequence[Observer]) -> Observer:
    """Tells every one of these observers."""

    def tell(event: Event) -> None:
        """Tells an event to each of the observers, in their order."""
        for observer in observers:
            observer(event)

    return tell
