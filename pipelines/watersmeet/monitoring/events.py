"""The events of a run, as its observers get them: the metrics, the consumer groups, the lineage.

An event is reported after the fact, from the thread in which it happened, and holds only what a
layer knows anyway. An observer must be quick, safe to call from several threads, and raise nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from watersmeet.core.clocks import Clocks
from watersmeet.core.plan import OpenTransaction, TopicPartition

Counts: TypeAlias = Mapping[tuple[str, str], int]
"""Records by outcome and, where they were refused, reason (else empty)."""


@dataclass(frozen=True)
class OwnerChanged:
    """A change of owner: this process holds the lease of some layers, with this fencing token, or
    does not any more.
    """

    layers: Sequence[str]
    token: int
    is_owner: bool


@dataclass(frozen=True)
class StepDone:
    """A step of a batch that a layer has done."""

    layer: str
    step: str
    seconds: float


@dataclass(frozen=True)
class Committed:
    """A new commit of this process to a table, one that decides."""

    table: str


@dataclass(frozen=True)
class BronzeProgress:
    """The offsets (exclusive) up to which bronze has read some topic-partitions."""

    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True)
class RecordsProcessed:
    """The outcomes of the records that a layer has handled in a batch, by the topic that they come
    from, or go to.
    """

    layer: str
    topics: Mapping[str, Counts]


class SourceStanding(NamedTuple):
    """The state of the merge in a topic-partition: the next offset, the position and the head (ms),
    and the source's state.
    """

    next_offset: int
    position: int | None
    head: int | None
    state: str


@dataclass(frozen=True)
class MergeProgress:
    """The state of the merge, after a batch or where there was nothing to merge.

    `clocks`: by partition, in ms. `tenant_clocks`: the clocks of single tenants (None: not told).
    """

    clocks: Mapping[int, int]
    sources: Mapping[TopicPartition, SourceStanding]
    tenant_clocks: Clocks | None = None


@dataclass(frozen=True)
class Published:
    """The number of the last message of each partition of the sink that holds one."""

    topic: str
    sequences: Mapping[int, int]


class TenantsSampled(NamedTuple):
    """A sample of the tenants.

    - `waiting_rows`: how many records wait for their tenants' clocks.
    - `tenants`: how many tenants have something open or waiting; 0 without tenants.
    - `lag_ms`: how far the slowest of them is behind the clock of its partition.
    """

    waiting_rows: int
    tenants: int
    lag_ms: int


@dataclass(frozen=True)
class Sampled:
    """The answers to what a run asks now and then.

    - `bounds`: the first offset and the exclusive end offset of each topic-partition in Kafka.
    - `open_rows`: how many merge records are open (None: as before).
    - `tenants`: how tenants stand (None: as before).
    - `transactions`: the oldest open transaction of each topic-partition that has one.
    - `behind_sink`: by partition, how many merge records are never published (None: as before).
    - `dropped`: by source, the share of the newest records with fields that its schema lacks (None:
      as before).
    """

    bounds: Mapping[TopicPartition, tuple[int, int]]
    open_rows: int | None
    tenants: TenantsSampled | None = None
    transactions: Mapping[TopicPartition, OpenTransaction] = field(default_factory=dict)
    behind_sink: Mapping[int, int] | None = None
    dropped: Mapping[str, float] | None = None


@dataclass(frozen=True)
class LagObserved:
    """Number of offsets of each partition of a topic that a layer has not passed, as far as it has
    looked.
    """

    layer: str
    topic: str
    records: Mapping[int, int]


@dataclass(frozen=True)
class Judged:
    """How many merge records a batch has found not to be valid, by reason."""

    refused: Mapping[str, int]


@dataclass(frozen=True)
class Failed:
    """A failure for a reason of this kind (`errors.kind_of`), after which the same is tried again,
    or the run ends.
    """

    kind: str
    is_retried: bool


@dataclass(frozen=True)
class Checked:
    """A check of a suite of expectations on a table; `failed` of its expectations are not met."""

    suite: str
    table: str
    failed: int


Event: TypeAlias = (
    OwnerChanged
    | StepDone
    | Committed
    | BronzeProgress
    | RecordsProcessed
    | Judged
    | MergeProgress
    | Published
    | Sampled
    | LagObserved
    | Failed
    | Checked
)
Observer: TypeAlias = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Do nothing: the observer of a run that nobody observes."""


def all_of(observers: Sequence[Observer]) -> Observer:
    """Return an observer that passes each event on to all of these observers."""

    def notify(event: Event) -> None:
        """Pass an event on to each of the observers, in their order."""
        for observer in observers:
            observer(event)

    return notify
