"""Runs the layers: once over everything that is available, or until they are stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from pipelines.audit.validate import check_expressions, check_tables, has_expressions
from pipelines.bronze import Bronze
from pipelines.core.inputs import of_source, source_of
from pipelines.core.types import ddl, widened
from pipelines.engine import Engine, Running
from pipelines.engine.choice import create_tables, open_engine
from pipelines.engine.threads import RunningThread
from pipelines.errors import (
    ConfigurationError,
    KafkaTransientError,
    LeaseLostError,
    LeaseTakenError,
    is_data_loss,
    kind_of,
)
from pipelines.gold import Gold
from pipelines.kafka.cluster import Cluster, co_partitioned, topics_of
from pipelines.kafka.groups import Groups
from pipelines.kafka.idle_detector import IdleDetector
from pipelines.kafka.options import check_options
from pipelines.kafka.publisher import sink_publisher
from pipelines.kafka.registry import Registry
from pipelines.kafka.topic_monitor import TopicMonitor
from pipelines.lake import tables
from pipelines.lake.commits import (
    APPLICATION,
    DELETING,
    EVOLVING,
    RESETTING,
    application_of,
    bronze_application,
    last_commit,
)
from pipelines.lake.conflicts import suppress_conflict
from pipelines.lake.epochs import (
    Epochs,
    changes,
    check_rules,
    epoch_row,
    keep_first_epoch,
    may_begin_anew,
    read_epochs,
)
from pipelines.lake.features import check_features
from pipelines.lake.fingerprints import is_noted, keep_read_since
from pipelines.lake.identity import (
    check_identity,
    check_layout,
    identity,
    keep_identity,
    keep_moved,
)
from pipelines.lake.lease import FORGET, Lease
from pipelines.lake.location import Lake
from pipelines.lake.maintenance import Maintenance, keep_properties
from pipelines.lake.restored import check_not_restored
from pipelines.lake.store import check_writable, stored
from pipelines.lake.table_reader import TableReader
from pipelines.monitoring.events import Failed, Observer, OwnerChanged, all_of
from pipelines.monitoring.observability import Reporter
from pipelines.operations.retention import expire
from pipelines.running.dead_letters import DeadLetters
from pipelines.running.generations import begin_first, check_beginning
from pipelines.running.moved import moved_topics
from pipelines.running.next_offsets import NextOffsets
from pipelines.running.owner import Owner, now_ms
from pipelines.running.sampling import Sampler
from pipelines.running.streams import BatchGate, RetryPolicy, Stream, following, start_all
from pipelines.settings import Settings
from pipelines.silver import Silver

if TYPE_CHECKING:
    from pipelines.quality.beside import Checker

LAYERS = ("bronze", "silver", "gold")

LOOK_EVERY_S = 0.1
"""Interval at which a run checks its streams."""

LOOK_AGAIN_S = 1.0
"""Interval at which a run without its layers checks whether the command that has them has ended."""


@dataclass
class Run:
    """The chosen layers of one configuration in this process.

    Setting `stopping` ends the run after the batches under way.
    """

    settings: Settings
    layers: Sequence[str]
    reporter: Reporter
    stopping: threading.Event = field(default_factory=threading.Event)
    patience_s: float = 120.0
    """Time for which trouble with Kafka or the object store is waited out."""
    observers: Sequence[Observer] = ()
    """Receivers of the run's events; without any, nothing is sampled for them."""

    def __post_init__(self) -> None:
        """Check Kafka and the lake's location before an engine is started, to report trouble at
        once.

        Raises WatersmeetError.
        """
        if unusable := check_options(self.settings.kafka):
            raise ConfigurationError(unusable[0])
        for source in self.settings.sources.values():
            if source.registry is not None:
                Registry(source.registry).check_options()
        cluster = Cluster(self.settings.kafka)
        self.partitions = co_partitioned(
            self.settings, cluster.partition_counts(topics_of(self.settings))
        )
        lake = Lake(self.settings)
        check_writable(lake)
        self.engine = open_engine(self.settings)
        reader = self.engine.reader
        check_layout(reader, self.engine.lake)
        check_features(reader, self.engine.lake)
        check_not_restored(reader, self.engine.lake)
        epochs = read_epochs(reader, self.settings)
        rules = self.settings.rules()
        if not self._begins_anew(reader, epochs):
            check_rules(epochs, self.settings)
        self.settings = (
            epochs.current.settings.under(rules)
            if changes(epochs, self.settings)
            else epochs.current.settings
        )
        self.engine.lake = Lake(self.settings)
        has_sql = has_expressions(self.settings.publish)
        problems = check_expressions(self.engine, self.settings) if has_sql else []
        problems += check_tables(self.engine.lake, reader)
        if problems:
            what, where, fix = problems[0]
            raise ConfigurationError(f"{where}: {what}; {fix}")
        if "bronze" in self.layers:
            check_beginning(reader, self.settings, self.partitions)
        create_missing(self.engine)
        observe = all_of(self.observers)
        self._background: list[Groups | Sampler | Checker] = [Groups(self.settings)]
        if self.settings.quality.every is not None and "silver" in self.layers:
            from pipelines.quality.beside import Checker  # imports Great Expectations

            self._background.append(
                Checker(
                    self.engine, self.settings, self.settings.quality.every, self.reporter, observe
                )
            )
        if self.observers:
            self._background.append(
                Sampler(self.settings, self.partitions, self.layers, self.engine.reader, observe)
            )
        self.notify = all_of([*self.observers, *self._background])
        check_store = partial(check_writable, lake) if stored(lake) else None
        self.retry_policy = RetryPolicy(
            self.reporter, self.stopping, self.patience_s, check_store, self.notify
        )
        self.reporter.notify("lake", "ready")

    def _widen_shared(self, *names: str) -> None:
        """Widen tables that owners of other layers, which may start too, write to as well."""
        for name in names:
            with suppress_conflict():
                evolve_schema(self.engine, [name])

    def _begins_anew(self, reader: TableReader, epochs: Epochs) -> bool:
        """Return True if rules that differ from the lake's need no `evolve`.

        So it is while nothing was read and no other process has a layer.
        """
        return set(LAYERS) <= set(self.layers) and may_begin_anew(reader, epochs, self.settings)

    def once(self) -> None:
        """Pass everything that is available now through the layers.

        Each layer begins with what the one before has handed on so far, and ends after it. Raises
        WatersmeetError if a stream failed.
        """
        with self._watched(), self.take_layers() as layer_set:
            self.supervise(layer_set, layer_set.streams(once=True))

    def until_stopped(self) -> None:
        """Run every layer after the one before it, until `stopping` is set.

        Returns once every batch under way is done. Raises WatersmeetError if a stream failed; the
        others are stopped in the same way first.
        """
        with self._watched(), self.take_layers(can_be_idle=True) as layer_set:
            self.supervise(layer_set, layer_set.streams(once=False))

    def supervise(self, layer_set: LayerSet, streams: Sequence[Stream]) -> None:
        """Start the streams and supervise them until they end, or until `stopping` is set.

        Afterwards `stopping` is set. Raises WatersmeetError if a stream failed; the others are
        stopped after their batches first.
        """
        watch = self._watch()
        try:
            if not self.stopping.is_set():
                start_all(streams)
            while not (
                self.stopping.wait(LOOK_EVERY_S) or all(stream.is_done for stream in streams)
            ):
                watch.poll()
                for stream in streams:
                    stream.supervise()
        finally:
            self.stopping.set()  # so that no batch is cut in two
            for stream in streams:
                stream.stop()
        layer_set.raise_if_lost()
        for stream in streams:
            stream.raise_failure()

    def _watch(self) -> TopicMonitor:
        def away(error: KafkaTransientError, news: str) -> None:
            """Report to people and observers that Kafka is waited for."""
            self.reporter.notify("kafka", news)
            self.notify(Failed(kind_of(error), is_retried=True))

        return TopicMonitor(self.settings, self.partitions, away, self.patience_s)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Do the work beside the batches inside the `with` block.

        That is: offsets for consumer groups, samples for observers, checks.
        """
        threads = [RunningThread(type(work).__name__, work.follow) for work in self._background]
        try:
            yield
        finally:
            for thread in threads:
                thread.stop()

    @contextmanager
    def take_layers(
        self, *, can_be_idle: bool = False, change: str | None = None
    ) -> Iterator[LayerSet]:
        """Take the layers, so that only this process writes them inside the `with` block.

        Every earlier owner, however it ended, is fenced before the tables are read.

        `change`: the command that takes them to change the lake. A run in progress loses them to
        it. Raises LeaseLostError if another process has taken the layers over by the end. Raises
        ConfigurationError, before any layer is taken, if the configuration is not of this lake.
        """
        reader = self.engine.reader
        ids = Cluster(self.settings.kafka).topic_ids(topics_of(self.settings))
        facts = identity(self.settings, self.partitions, ids)
        moved = moved_topics(reader, self.settings, self.partitions, facts)
        check_identity(reader, {field: fact for field, fact in facts.items() if field not in moved})
        written = [pair for layer in self.layers for pair in _written_by(layer, self.settings)]

        def lost() -> None:
            """Tell the observers that another process has the layers now, and stop the run."""
            self.notify(OwnerChanged(self.layers, lease.token, is_owner=False))
            self.stopping.set()

        lease = Lease(
            self.engine.lake, reader, self.engine.append, self.layers, change, on_lost=lost
        )
        self._widen_shared(tables.LEASES)
        lease.take(partial(_largest_token, reader, written))
        try:
            self.notify(OwnerChanged(self.layers, lease.token, is_owner=True))
            owner = Owner(self.engine, lease.token, self.notify, is_observed=bool(self.observers))
            self._widen_own(written)
            fence_all(owner, written)  # after widening, since a fence writes every column
            moved_facts = {field: facts[field] for field in moved}
            keep_moved(reader, self.engine.append, self.settings, moved_facts)
            keep_identity(reader, self.engine.append, self.settings, facts)
            epochs = self._keep_epochs(owner)
            if "silver" in self.layers:
                keep_properties(self.engine, tables.SILVER)
            if "bronze" in self.layers:
                self._begin_reading(owner, epochs)
            layer_set = LayerSet(self, owner, lease, can_be_idle=can_be_idle)
            self.retry_policy.run(layer_set.complete)
            yield layer_set
            lease.check()
        except BaseException:
            with suppress(Exception):  # a takeover may be what made it fail
                lease.check()
            # The first failure is reported; the next owner finds this one dead, or silent.
            with suppress(Exception):
                lease.release()
            if lease.lost is not None:
                raise lease.lost from None
            raise
        else:
            lease.release()
        finally:
            self.notify(OwnerChanged(self.layers, lease.token, is_owner=False))

    def _widen_own(self, written: Sequence[tuple[str, str]]) -> None:
        """Widen the tables to which the layers' owner commits (`_written_by`)."""
        own = {
            "bronze": [
                *map(tables.bronze, self.settings.sources),
                tables.QUARANTINE,
                tables.RECOVERED,
            ],
            "silver": [tables.SILVER, tables.LATE, tables.PROGRESS],
            "gold": [tables.PUBLISHED],
        }
        for layer in self.layers:
            if evolve_schema(self.engine, own[layer]) and layer == "silver":
                create_view(self.engine)
        self._widen_shared(
            *{table for table, _ in written}.difference(*[own[layer] for layer in self.layers])
        )

    def _keep_epochs(self, owner: Owner) -> Epochs:
        """Record the first epoch, or the rules of a lake that begins anew; return the epochs.

        Raises ConfigurationError if the rules have changed since the run was created.
        """
        reader = self.engine.reader
        keep_first_epoch(reader, self.engine.append, self.settings, now_ms())
        epochs = read_epochs(reader, self.settings)
        if self._begins_anew(reader, epochs):
            row = epoch_row(self.settings, epochs.current.number + 1, 0, now_ms())
            owner.append(tables.EPOCHS, row, EVOLVING)
            return read_epochs(reader, self.settings)
        check_rules(epochs, self.settings)
        return epochs

    def _begin_reading(self, owner: Owner, epochs: Epochs) -> None:
        """Begin the lake if it has not begun, and note where bronze begins to read by an epoch."""
        reader = self.engine.reader
        publisher = sink_publisher(self.settings) if "gold" in self.layers else None
        begin_first(owner, self.settings, self.partitions, publisher)
        if not is_noted(reader, self.settings, epochs.current.number):
            next_offsets = NextOffsets(reader, self.settings, self.partitions)
            offsets = {source: next_offsets.of(source) for source in self.settings.inputs}
            keep_read_since(reader, self.engine.append, self.settings, epochs, offsets)


def _largest_token(reader: TableReader, written: Sequence[tuple[str, str]]) -> int:
    """Return the largest fencing token in the last commits to these tables; 0 if there are none."""
    last_commits = (last_commit(reader, table, application) for table, application in written)
    return max((last[1].token for last in last_commits if last is not None), default=0)


def run_with_restarts(
    begin: Callable[[], None],
    asked_to_stop: threading.Event,
    stopping: threading.Event,
    reporter: Reporter,
) -> None:
    """Run `begin`, and run it again each time `watersmeet forget` has taken its layers and ended.

    The run that `begin` starts ends when `stopping` is set. To ask it to stop, set `asked_to_stop`
    first and then `stopping`, which the loss of the layers sets as well.
    """
    while True:
        try:
            begin()
            return
        except (LeaseTakenError, LeaseLostError) as error:
            if error.change != FORGET:  # `evolve` changes the rules that the run was started with
                raise
            reporter.notify("lake", f"waiting for `watersmeet {error.change}` to end")
        stopping.clear()
        if asked_to_stop.wait(LOOK_AGAIN_S):
            return


class LayerSet:
    """The layers of a run that holds their lease."""

    def __init__(self, run: Run, owner: Owner, lease: Lease, *, can_be_idle: bool) -> None:
        self._run = run
        self._settings = run.settings
        self.owner = owner
        self._lease = lease
        idle_after_ms = self._settings.merge.idle_after_ms if can_be_idle else None
        self._idle_detector = (
            IdleDetector(self._settings, idle_after_ms) if idle_after_ms is not None else None
        )
        self.silver = Silver(owner, self._settings, run.partitions, self._idle_detector)
        self.gold = Gold(owner, self._settings, run.partitions, lease.check)
        self.dead_letters = [
            DeadLetters(owner, self._settings, run.partitions, table, topic, lease.check)
            for table, topic in self._settings.publish.dead_letter_topics.items()
        ]
        self.expire = partial(expire, owner, self._settings)
        self._expire_some = partial(self.expire, only_if_worthwhile=True)
        self._maintenance = {
            layer: Maintenance(
                owner.engine, kept_by(layer, self._settings), expire=self._expire_some
            )
            for layer in ("silver", "gold")
        }
        self._news = {layer: threading.Event() for layer in ("silver", "gold")}

    def complete(self) -> None:
        """Complete what a crash left of the last commit of each owned layer.

        This comes before anything is planned, deleted, read elsewhere or changed.
        """
        if "bronze" in self._run.layers:
            for source in self._settings.inputs:
                Bronze(self.owner, self._settings, source).complete()
        if "silver" in self._run.layers:
            self.silver.complete()
        if "gold" in self._run.layers:
            self.gold.complete()
            for dead_letters in self.dead_letters:
                dead_letters.complete()

    @property
    def is_lost(self) -> bool:
        """True where another process has taken the layers over."""
        return self._lease.lost is not None

    def raise_if_lost(self) -> None:
        """Raise LeaseLostError if another process has taken the layers over."""
        if self._lease.lost is not None:
            raise self._lease.lost

    def streams(self, *, once: bool) -> list[Stream]:
        """Return a stream for each input, one for silver and one for gold, as far as chosen.

        They run up to what there is now (`once`), or until they are stopped.
        """
        bronze = (
            [self.bronze(name, once=once) for name in self._settings.inputs]
            if "bronze" in self._run.layers
            else []
        )
        silver = []
        gold = []
        if "silver" in self._run.layers:
            upstream = [tables.bronze(source) for source in self._settings.sources]
            silver = [
                self._following(
                    "silver",
                    upstream,
                    bronze if once else None,
                    self.drain_silver,
                    self._is_idle_check_due,
                )
            ]
        if "gold" in self._run.layers:
            upstream = [tables.SILVER, *self._settings.publish.dead_letter_topics]
            gold = [self._following("gold", upstream, silver if once else None, self.drain_gold)]
        return bronze + silver + gold

    def bronze(self, source: str, *, once: bool) -> Stream:
        """Return the stream of an input; each time it is started, it begins where the lake says."""
        run = self._run
        engine = self.owner.engine
        maintenance = Maintenance(
            engine, kept_by("bronze", self._settings, source), expire=self._expire_some
        )
        bronze = Bronze(self.owner, self._settings, source, run.reporter, maintenance)
        next_offsets = NextOffsets(engine.reader, self._settings, run.partitions, self.owner)

        def begin(batch_gate: BatchGate) -> Running:
            """Start reading a source at its next offsets, which follow from the tables."""

            def process_batch(work: Callable[[], None]) -> None:
                """Run a batch of bronze under the gate, and notify silver."""
                batch_gate.run(work)
                self._news["silver"].set()

            return bronze.start(next_offsets.checked(source), process_batch, once=once)

        goes_on = self._settings.kafka.on_data_loss == "continue"

        def passes_on(failure: Exception) -> bool:
            """Return True if reading would not fail again after a restart."""
            return bronze.has_given_up(failure) or (goes_on and is_data_loss(failure))

        return Stream(BatchGate(run.retry_policy, passes_on), begin, ends=once)

    def drain_silver(self) -> None:
        """Merge everything that is available."""
        for plan in self.silver.drain(self._run.stopping.is_set):
            offsets = sum(done.size for done in plan.ranges.values())
            clock = min(plan.clocks.values(), default=None)
            news = f"batch {plan.batch}: {offsets} offsets, slowest clock {_utc(clock)}"
            self._run.reporter.notify(
                "silver", news, batch=plan.batch, offsets=offsets, clock=clock
            )
            self._news["gold"].set()
            self._maintenance["silver"].after_commit()

    def drain_gold(self) -> None:
        """Publish everything that is finished, and send the dead letters that there are."""
        for publications in self.gold.drain(self._run.stopping.is_set):
            messages = sum(p.tail.seq - p.first_seq + 1 for p in publications)
            topic = self._settings.publish.topic
            self._run.reporter.notify(
                "gold", f"{messages} messages published to {topic}", messages=messages, topic=topic
            )
            self._maintenance["gold"].after_commit()
        for dead_letters in self.dead_letters:
            for sent in dead_letters.drain(self._run.stopping.is_set):
                self._run.reporter.notify(
                    "gold",
                    f"{sent} dead letters sent to {dead_letters.topic}",
                    messages=sent,
                    topic=dead_letters.topic,
                )
                self._maintenance["gold"].after_commit()

    def _is_idle_check_due(self) -> bool:
        return self._idle_detector is not None and self._idle_detector.is_due

    def _following(
        self,
        layer: str,
        upstream: Sequence[str],
        until_done: Sequence[Stream] | None,
        drain: Callable[[], None],
        is_due: Callable[[], bool] = lambda: False,
    ) -> Stream:
        """Return a stream that calls `drain` at its start, and again for what is new.

        With `until_done`, it does so until these streams of the same run are done. Otherwise it
        does so whenever a table upstream has a new commit, and when it is due.
        """
        if until_done is not None:
            news = self._news[layer]
            return Stream(
                BatchGate(self._run.retry_policy),
                lambda batch_gate: following(batch_gate, drain, until_done, news),
                ends=True,
            )

        def begin(batch_gate: BatchGate) -> Running:
            """Start following the versions of the tables that the layer reads."""
            return self.owner.engine.follow(layer, upstream, lambda: batch_gate.run(drain))

        return Stream(BatchGate(self._run.retry_policy), begin, drain, is_due)


def create_missing(engine: Engine) -> None:
    """Create every missing table of the lake's layout, and a catalog's live view.

    Existing tables stay as they are.
    """
    create_tables(engine)
    create_view(engine)


def create_view(engine: Engine) -> None:
    """Create the live view of a catalog's lake."""
    if engine.lake.is_catalog:
        from pipelines.live import VIEW, live_sql  # imports Spark

        engine.create_view(VIEW, live_sql(engine.lake, engine.lake.settings))


def evolve_schema(engine: Engine, names: Sequence[str]) -> bool:
    """Add to these tables the missing columns and fields of the lake's layout.

    Returns True if any table lacked one. To be called by their owner, or where another writer that
    comes in between (a conflict) would make the same change.
    """
    lacked = False
    for table in (engine.lake.layout[name] for name in names):
        existing = engine.reader.columns(table.name)
        has_all = set(table.schema.names) <= set(existing.names)
        if not has_all or any(
            not _holds(existing.field(column.name).type, column.type) for column in table.schema
        ):
            engine.evolve_schema(table)
            lacked = True
    return lacked


def _holds(column: pa.DataType, required: pa.DataType) -> bool:
    return ddl(widened(column, required)) == ddl(column)


def fence_all(owner: Owner, written: Sequence[tuple[str, str]]) -> None:
    """Fence every earlier owner out of tables, each for an application (`_written_by`)."""
    by_table: dict[str, set[str]] = {}
    for table, application in written:
        by_table.setdefault(table, set()).add(application)

    def fence(table: str) -> None:
        """Fence all applications of a table."""
        for application in sorted(by_table[table]):
            owner.fence(table, application, is_shared=application == EVOLVING)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fence, by_table))


def _written_by(layer: str, settings: Settings) -> list[tuple[str, str]]:
    """Return the tables to which a layer's owner commits under its token, with their applications.

    Delta counts transaction versions by application: what the owner decides has one, and what it
    deletes another. An epoch belongs to all layers.

    Notes are not included: they carry the version of the commit that they follow from.
    """
    epochs = (tables.EPOCHS, EVOLVING)
    if layer == "bronze":
        read = [(tables.bronze(source_of(name)), application_of(name)) for name in settings.inputs]
        deleted = [
            (name, DELETING)
            for name in (*map(tables.bronze, settings.sources), tables.QUARANTINE, tables.ERASED)
        ]
        beginnings = (tables.GENERATIONS, tables.RESETS, tables.IDLE_HEARTBEATS, tables.RECOVERED)
        decided = [(table, bronze_application()) for table in beginnings]
        return [*read, *decided, *deleted, epochs]
    if layer == "silver":
        deleted = [(name, DELETING) for name in (tables.SILVER, tables.LATE, tables.FORGOTTEN)]
        decided = [(tables.SILVER, APPLICATION), (tables.IDLE_HEARTBEATS, APPLICATION)]
        decided += [(tables.SILVER, RESETTING), (tables.RESETS, RESETTING)]
        return [*decided, *deleted, epochs]
    return [(tables.PUBLISHED, APPLICATION), (tables.DEAD_LETTERS, APPLICATION), epochs]


def kept_by(layer: str, settings: Settings, source: str | None = None) -> list[str]:
    """Return the tables that the owner of a layer keeps small; with `source` (an input), its share.

    Each table has one keeper.
    """
    if layer == "silver":
        return [
            tables.SILVER,
            tables.LATE,
            tables.PROGRESS,
            tables.IDLE_HEARTBEATS,
            tables.RESETS,
            tables.QUALITY,
        ]
    if layer == "gold":
        return [tables.PUBLISHED, tables.DEAD_LETTERS]
    first = next(iter(settings.inputs))
    shared = [
        tables.QUARANTINE,
        tables.RECOVERED,
        tables.CONFIGURATION,
        tables.LEASES,
        tables.FLOORS,
    ]
    shared += [tables.GENERATIONS, tables.ERASED]
    shared += [tables.WRITER_SCHEMAS] if tables.has_registry(settings) else []
    if source is None:
        return [*map(tables.bronze, settings.sources), *shared]
    is_keeper = of_source(settings.inputs, source_of(source))[0] == source
    return [
        *([tables.bronze(source_of(source))] if is_keeper else []),
        *(shared if source == first else []),
    ]


def _utc(ms: int | None) -> str:
    if ms is None:
        return "undefined"
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
