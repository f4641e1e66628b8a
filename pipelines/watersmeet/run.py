"""Runs the layers: once over everything that is available, or until they are stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from watersmeet.audit.validate import (
    check_expressions,
    check_schemas,
    check_tables,
)
from watersmeet.core.types import ddl, widened
from watersmeet.cycle import Cycle
from watersmeet.engine import Engine, Running
from watersmeet.engine.choice import create_tables, open_engine
from watersmeet.engine.polling import RunningThread
from watersmeet.errors import (
    ConfigurationError,
    KafkaTransientError,
    LeaseLostError,
    LeaseTakenError,
    kind_of,
)
from watersmeet.kafka.cluster import Cluster, co_partitioned, topics_of
from watersmeet.kafka.groups import Groups
from watersmeet.kafka.options import check_options
from watersmeet.kafka.publisher import sink_publisher
from watersmeet.kafka.registry import Registry
from watersmeet.kafka.topic_monitor import TopicMonitor
from watersmeet.lake import tables
from watersmeet.lake.commits import last_commit, suppress_conflict
from watersmeet.lake.features import check_features
from watersmeet.lake.history import Epochs, epoch_body
from watersmeet.lake.identity import (
    changes,
    check_identity,
    check_layout,
    check_rules,
    keep_facts,
    keep_first_epoch,
    keep_identity,
    kept_facts,
    may_begin_anew,
)
from watersmeet.lake.journal import MOVED, RULES
from watersmeet.lake.lease import EVOLVE, FORGET, Lease
from watersmeet.lake.location import Lake
from watersmeet.lake.maintenance import keep_properties
from watersmeet.lake.restored import (
    check_not_behind,
    check_not_deleted,
    check_not_restored,
)
from watersmeet.lake.store import check_writable, stored
from watersmeet.lake.table_reader import ReadOnce, TableReader, extreme
from watersmeet.lake.torn import move_aside
from watersmeet.monitoring.events import Failed, Observer, OwnerChanged, all_of
from watersmeet.monitoring.observability import Reporter
from watersmeet.running.generations import begin_first, check_beginning
from watersmeet.running.next_offsets import read_facts
from watersmeet.running.owner import Owner, fence_all, kept_by, written_by
from watersmeet.running.runner import Runner
from watersmeet.running.sampling import Sampler
from watersmeet.settings import Settings

if TYPE_CHECKING:
    from watersmeet.quality.beside import Checker

LAYERS = ("bronze", "silver", "gold")

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
    change: str | None = None
    """The command that takes the layers to change the lake."""
    is_preview: bool = False
    """True where nothing is changed: it only says what the layers could do."""

    def __post_init__(self) -> None:
        """Check Kafka and the lake's location before an engine is started, to report trouble at
        once.

        Raises WatersmeetError.
        """
        if unusable := check_options(self.settings.kafka):
            raise ConfigurationError(*unusable[0])
        for registry in self.settings.registries.values() if "bronze" in self.layers else ():
            Registry(registry).check_options()
        self.reporter.begin(f"waits for Kafka at {self.settings.kafka.bootstrap_servers}")
        cluster = Cluster(self.settings.kafka)
        self.partitions = co_partitioned(
            self.settings, cluster.partition_counts(topics_of(self.settings))
        )
        lake = Lake(self.settings)
        check_writable(lake)
        is_spark = self.settings.engine == "spark"
        self.reporter.begin(f"waits for {'a session of Spark' if is_spark else 'the engine'}")
        self.engine = open_engine(self.settings)
        self.reporter.begin("checks the lake's tables")
        reader = self.engine.reader
        for table in [] if self.is_preview else move_aside(self.engine.lake):
            self.engine.create(self.engine.lake.layout[table])
        check_layout(reader, self.engine.lake)
        check_features(reader, self.engine.lake)
        check_not_restored(reader, self.engine.lake)
        check_not_deleted(reader, self.settings)
        history = check_not_behind(reader, self.settings)
        epochs = history.epochs
        rules = self.settings.rules()
        if not self._begins_anew(reader, epochs):
            check_rules(epochs, self.settings)
        self.settings = (
            epochs.current.settings.under(rules)
            if changes(epochs, self.settings)
            else epochs.current.settings
        )
        self.engine.lake = Lake(self.settings)
        # `evolve` changes expressions that a later version does not take any more.
        problems = [] if self.change == EVOLVE else check_expressions(self.settings)
        problems += check_tables(self.engine.lake, reader)
        if problems:
            raise ConfigurationError(*problems[0])
        if "bronze" in self.layers and not history.generations:
            check_beginning(self.settings, self.partitions)
        if not self.is_preview:
            create_missing(self.engine)
        observe = all_of(self.observers)
        self._background: list[Groups | Sampler | Checker] = [Groups(self.settings)]
        if self.settings.quality.every is not None and "silver" in self.layers:
            from watersmeet.quality.beside import Checker  # imports Great Expectations

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
        self.runner = Runner(
            self.reporter, self.stopping, self.patience_s, check_store, self.notify
        )
        self.reporter.notify("lake", "ready")

    def _widen_shared(self, *names: str) -> None:
        """Widen tables that owners of other layers, which may start too, write to as well."""
        for name in names:
            with suppress_conflict():
                evolve_schema(self.engine, [name])

    def _begins_anew(self, reader: TableReader, epochs: Epochs) -> bool:
        # Only while nothing was read and no other process has a layer.
        return set(LAYERS) <= set(self.layers) and may_begin_anew(reader, epochs, self.settings)

    def once(self) -> None:
        """Pass everything that is available now through the layers, and return.

        Raises WatersmeetError if a layer failed.
        """
        with self._watched(), self.take_layers() as cycle:
            self.run_to_end(cycle.run)
            cycle.raise_if_lost()

    def until_stopped(self) -> None:
        """Pass on what comes, until `stopping` is set.

        Returns once the batches under way are done. Raises WatersmeetError if a layer failed.
        """
        with self._watched(), self.take_layers(can_be_idle=True) as cycle:
            self._supervise(cycle.run, cycle.follow, lambda: cycle.is_due)
            cycle.raise_if_lost()

    def run_to_end(self, work: Callable[[], object]) -> None:
        """Do work of the layers, which ends by itself or once `stopping` is set.

        Afterwards `stopping` is set. Raises WatersmeetError if it failed.
        """
        self._supervise(work, partial(_beside, "cycle"), ends=True)

    def _supervise(
        self,
        work: Callable[[], object],
        follow: Callable[[Callable[[], None]], Running],
        is_due: Callable[[], bool] = lambda: False,
        *,
        ends: bool = False,
    ) -> None:
        def away(error: KafkaTransientError, news: str) -> None:
            self.reporter.notify("kafka", news)
            self.notify(Failed(kind_of(error), is_retried=True))

        topics = TopicMonitor(self.settings, self.partitions, away, self.patience_s)

        def look() -> bool:
            topics.poll()
            return is_due()

        self.runner.supervise(work, follow, look, ends=ends)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        threads = [RunningThread(type(work).__name__, work.follow) for work in self._background]
        try:
            yield
        finally:
            for thread in threads:
                thread.stop()

    @contextmanager
    def take_layers(self, *, can_be_idle: bool = False) -> Iterator[Cycle]:
        """Take the layers, so that only this process writes them inside the `with` block.

        Every earlier owner, however it ended, is fenced before the tables are read.

        A run in progress loses them to a command that changes the lake. Raises LeaseLostError if
        another process has taken the layers over by the end. Raises ConfigurationError, before any
        layer is taken, if the configuration is not of this lake, or if no table can have what the
        rules need, unless a command changes them.
        """
        reader = self.engine.reader
        if self.change is None and (unfit := check_schemas(self.settings)):
            raise ConfigurationError(*unfit[0])
        self.reporter.begin("takes the layers, and keeps earlier runs out")
        facts, moved = self.check_identity()
        written = [pair for layer in self.layers for pair in written_by(layer, self.settings)]

        def lost() -> None:
            self.notify(OwnerChanged(self.layers, lease.token, is_owner=False))
            self.stopping.set()

        lease = Lease(
            self.engine.lake, reader, self.engine.append, self.layers, self.change, on_lost=lost
        )
        self._widen_shared(tables.LEASES)
        lease.take(partial(_largest_token, reader, written))
        try:
            self.notify(OwnerChanged(self.layers, lease.token, is_owner=True))
            owner = Owner(self.engine, lease.token, self.notify, is_observed=bool(self.observers))
            self._widen_own(written)
            owner.take(self.layers)
            fence_all(owner, written)  # after widening, since a fence writes every column
            if moved:
                keep_facts(
                    reader, self.engine.append, {field: facts[field] for field in moved}, MOVED
                )
            if moved or not facts.keys() <= owner.history(self.settings).facts.keys():
                keep_identity(reader, self.engine.append, facts)
            self._keep_epochs(owner)
            if "silver" in self.layers:
                keep_properties(self.engine, tables.SILVER)
            if "bronze" in self.layers:
                self._begin_reading(owner)
            cycle = Cycle(self, owner, lease, can_be_idle=can_be_idle)
            self.reporter.begin("completes what the last run left")
            self.runner.retry(cycle.complete)
            self.reporter.begin()
            yield cycle
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

    def check_identity(self) -> tuple[dict[str, str], set[str]]:
        """Return the facts of the lake (`lake.identity`), and those of topics that have moved.

        Raises ConfigurationError if the configuration is not of this lake.
        """
        reader = self.engine.reader
        facts, moved = read_facts(reader, self.settings, self.partitions)
        unmoved = {field: fact for field, fact in facts.items() if field not in moved}
        check_identity(kept_facts(reader), unmoved)
        return facts, moved

    def _widen_own(self, written: Sequence[tuple[str, str]]) -> None:
        names = {table for table, _ in written}
        for layer in self.layers:
            own = [name for name in kept_by(layer, self.settings) if name in names]
            names.difference_update(own)
            if evolve_schema(self.engine, own) and layer == "silver":
                create_views(self.engine)
        self._widen_shared(*names)

    def _keep_epochs(self, owner: Owner) -> None:
        reader = self.engine.reader
        if not owner.history(self.settings).has_rules:
            keep_first_epoch(reader, self.engine.append, self.settings)
        epochs = owner.history(self.settings).epochs
        if self._begins_anew(reader, epochs):
            number = epochs.current.number + 1
            owner.decide(RULES, epoch_body(self.settings, number, 0, read_since={}))
        else:
            check_rules(epochs, self.settings)

    def _begin_reading(self, owner: Owner) -> None:
        topics = self.settings.publish.sequence_topics if "gold" in self.layers else []
        publishers = [sink_publisher(self.settings, topic) for topic in topics]
        begin_first(owner, self.settings, self.partitions, publishers)


def _largest_token(reader: TableReader, written: Sequence[tuple[str, str]]) -> int:
    histories = ReadOnce(reader)
    last_commits = (last_commit(histories, table, application) for table, application in written)
    tokens = [last[1].token for last in last_commits if last is not None]
    return max([extreme(reader, tables.JOURNAL, "token") or 0, *tokens])


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


def _beside(name: str, work: Callable[[], None]) -> Running:
    return RunningThread(name, lambda _: work())


def create_missing(engine: Engine) -> None:
    """Create every missing table of the lake's layout, and a catalog's views.

    Existing tables stay as they are.
    """
    create_tables(engine)
    create_views(engine)


def create_views(engine: Engine) -> None:
    """Create the views of a catalog's lake: those of its tables (`lake.views`), `live`, and then
    those of views.
    """
    lake = engine.lake
    if not lake.is_catalog:
        return
    from watersmeet.lake.by_spark import view_sql  # imports Spark
    from watersmeet.live import LIVE, live_sql

    # The tables may still lack columns that rules of now need.
    of_tables = {part.table for view in lake.views.values() for part in view.parts}
    columns = {table: engine.reader.columns(table).names for table in of_tables}
    queries = {name: view_sql(lake, name, columns) for name in lake.views}
    queries[LIVE] = live_sql(lake, lake.settings)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(engine.create_view, queries, queries.values()))
    for view in lake.derived.values():
        engine.create_view(
            view.name, view.of({name: lake.own_address(name) for name in view.reads})
        )


def evolve_schema(engine: Engine, names: Iterable[str]) -> bool:
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
