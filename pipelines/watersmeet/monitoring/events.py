"""The events of a run, as its observers get them: the metrics, the consumer groups, the lineage.

An event is reported after the fact, from the thread in which it happened, and holds only what a
layer knows anyway. An observer must be quick, safe to call from several threads, and raise nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from watersmeet.core.plan import OpenTransaction, TopicPartition
from watersmeet.core.state import State

Counts: TypeAlias = Mapping[tuple[str, str], int]
"""Records by outcome and, where they were refused, reason (else empty)."""


class OwnerChanged(NamedTuple):
    """This process holds the lease of some layers, with this fencing token, or no longer does."""

    layers: Sequence[str]
    token: int
    is_owner: bool


class StepDone(NamedTuple):
    """A step of a batch that a layer has done."""

    layer: str
    step: str
    seconds: float


class Committed(NamedTuple):
    """A new commit of this process to a table, one that decides."""

    table: str


class BronzeProgress(NamedTuple):
    """The offsets (exclusive) up to which bronze has read some topic-partitions."""

    offsets: Mapping[TopicPartition, int]


class RecordsProcessed(NamedTuple):
    """The outcomes of a layer's records in a batch, by the topic that they come from, or go to."""

    layer: str
    topics: Mapping[str, Counts]


class SourceStanding(NamedTuple):
    """The state of the merge in a topic-partition; `position` and `head` in ms."""

    next_offset: int
    position: int | None
    head: int | None
    state: str


class MergeProgress(NamedTuple):
    """The state of the merge, after a batch or where there was nothing to merge.

    `clocks`: by partition, in ms. `state`: with the clocks of single tenants (None: not told).
    """

    clocks: Mapping[int, int]
    sources: Mapping[TopicPartition, SourceStanding]
    state: State | None = None


class Published(NamedTuple):
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


class Sampled(NamedTuple):
    """The answers to what a run asks now and then; None: as before.

    - `bounds`: the first offset and the exclusive end offset of each topic-partition in Kafka.
    - `open_rows`: how many merge records are open.
    - `transactions`: the oldest open transaction of each topic-partition that has one.
    - `behind_sink`: by partition, how many merge records are never published.
    - `dropped`: by source, the share of the newest records with fields that its schema lacks.
    """

    bounds: Mapping[TopicPartition, tuple[int, int]]
    open_rows: int | None
    tenants: TenantsSampled | None = None
    transactions: Mapping[TopicPartition, OpenTransaction] = MappingProxyType({})
    behind_sink: Mapping[int, int] | None = None
    dropped: Mapping[str, float] | None = None


class LagObserved(NamedTuple):
    """How many offsets of a topic's partitions a layer has not passed, as far as it has looked."""

    layer: str
    topic: str
    records: Mapping[int, int]


class Judged(NamedTuple):
    """How many merge records a batch has found not to be valid, by reason."""

    refused: Mapping[str, int]


class Failed(NamedTuple):
    """A failure of this kind (`errors.kind_of`), after which the same is tried again, or not."""

    kind: str
    is_retried: bool


class Checked(NamedTuple):
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
    """Return an observer that passes each event on to these, in their order."""

    def notify(event: Event) -> None:
        for observer in observers:
            observer(event)

    return notify
