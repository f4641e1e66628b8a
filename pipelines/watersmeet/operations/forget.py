"""Forgets a key: its records leave every table, and all else stays as it was, to the byte.

A record's event time moves the position of its topic-partition, and so the clock, lateness and
order of all other records. So bronze keeps the row of a forgotten record as a heartbeat: its place,
its times and its tenant, without key, value and headers. The merge makes of it what it made before,
except for the key. A rebuild gives the same, and a record of the key that comes later starts anew.
A refused record keeps its row of bronze, too, with the detail `forgotten`. Silver loses every row
of the key, in one commit, but for messages that were read back from the sink.

The owner of all layers does this. It takes them from a run in progress, which waits and goes on
afterwards. Rows are named by their places, because the Delta log must not contain the key. Each
step finds by itself what is left to do, so after a crash the command is called again, which also
gives the layers back. Else a key that is in no table takes no layers.

A redrive that began before is fenced: it may have read what is erased now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core import sequence as sequences
from watersmeet.core.columns import int64s, row_values
from watersmeet.core.inputs import InputId, of_source
from watersmeet.core.merge import REPLACING
from watersmeet.core.reading import FORGOTTEN, KEYED_BY, ReadingRules, merge_keys
from watersmeet.core.sequence import CORRECTED, MERGED
from watersmeet.core.types import TENANT, TIME
from watersmeet.errors import ConfigurationError, KafkaAccessError
from watersmeet.faults import fault_point
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.publisher import REDRIVE, fence_records
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit, is_conflict
from watersmeet.lake.history import read_history
from watersmeet.lake.inputs import of_key, of_topic
from watersmeet.lake.journal import BASE, ERASED
from watersmeet.lake.lease import FORGET, change_under_way
from watersmeet.lake.pieces import NOT_FORGOTTEN, chunks_of, read_chunk
from watersmeet.lake.published import last_tails_in, topic_of, with_message
from watersmeet.lake.schemas import avro_schemas
from watersmeet.lake.state import without_rows
from watersmeet.lake.table_reader import Condition, TableReader, Where, extreme, row_count
from watersmeet.lake.tables import DELETING
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run
from watersmeet.running.owner import Owner, now_ms
from watersmeet.running.published_parts import offsets_of, part_columns, places_of_parts
from watersmeet.settings import Settings

ROWS = 5_000
"""Maximum number of rows that are named in one commit."""

ATTEMPTS = 5
"""Attempts for a commit: a run that has just lost the layers may still compact a table."""

Places = Sequence[tuple[int, int]]
"""Partition and offset of records of one input."""


def check_tombstone(tenant: str | None) -> None:
    """Raise ConfigurationError for a tombstone of one tenant's key: it would be one of all."""
    if tenant is not None:
        raise ConfigurationError(
            "it tells consumers that the key of every tenant is gone",
            where="--tombstone",
            fix="leave it out, or --tenant",
        )


def forgotten(
    settings: Settings,
    key: str,
    reporter: Reporter,
    tenant: str | None = None,
    *,
    has_tombstone: bool = False,
) -> dict[str, Any]:
    """Forget the key, of one tenant or of all; return the answer of `forget --apply --json`.

    With a tombstone, the sink gets one for the key first, while the tables still say in which
    partitions it was. Raises LeaseTakenError while another command changes the lake.
    """
    run = Run(settings, LAYERS, reporter, change=FORGET)
    forgetting = Forgetting(run.engine.reader, settings, key, tenant)
    # One that was killed, perhaps at its end, still has the layers.
    has_ended = change_under_way(forgetting.reader, FORGET) is None
    if not has_tombstone and not forgetting.is_there and has_ended:
        return {**forgetting.preview(), "applied": True}
    with run.take_layers() as layer_set:
        for topic in settings.topics:
            fence_records(settings, topic, REDRIVE)
        forgetting = Forgetting(layer_set.owner.engine.reader, settings, key, tenant)
        answer = forgetting.preview()
        answer["tombstones"] = (
            sum(
                gold.send_tombstones(key, forgetting.partitions)
                for gold in (layer_set.gold, *layer_set.corrections)
            )
            if has_tombstone
            else 0
        )
        forgetting.erase(layer_set.owner)
    remaining = Forgetting(forgetting.reader, settings, key, tenant).preview()["tables"]
    after = {row["table"]: row["before"] for row in remaining}
    return {
        **answer,
        "applied": True,
        "tables": [{**row, "after": after[row["table"]]} for row in answer["tables"]],
    }


@dataclass
class Forgetting:
    """The places of a key, of one tenant or of all, as of the first query.

    Raises ConfigurationError if a tenant is named and the lake has none.
    """

    reader: TableReader
    settings: Settings
    key: str
    tenant: str | None = None

    def __post_init__(self) -> None:
        self.settings.merge.check_tenants("--tenant", self.tenant)
        # They know the topic of corrections that are no longer made, too.
        self.settings = read_history(self.reader, self.settings).epochs.current.settings

    def preview(self) -> dict[str, Any]:
        """Return where the key is, without erasing anything.

        `tables`: how many records of the key each table has, `before` and `after`. `held`: what
        else has them, and until when.
        """
        statuses = Counter(self._silver["status"].to_pylist())
        counts = {
            view: sum(statuses[name] for name in tables.statuses_of(view))
            for view in dict.fromkeys(status.view for status in tables.STATUSES.values())
        }
        counts[tables.QUARANTINE] = sum(map(len, self._refused.values()))
        for source in self.settings.sources:
            inputs = of_source(self.settings.inputs, source)
            counts[tables.bronze(source)] = sum(len(self._in_bronze(i)) for i in inputs)
        of_last = of_key(self.key, self.tenant, ("last_key", "last_tenant"))
        counts[tables.PUBLISHED] = row_count(self.reader, tables.PUBLISHED, [of_last])
        counts[tables.PASSED] += self._read_back
        table_rows = [
            {"table": table, "before": count, "after": count} for table, count in counts.items()
        ]
        return {
            "key": self.key,
            "applied": False,
            "tombstones": 0,
            "tables": table_rows,
            "held": list(self._further_copies()),
        }

    @property
    def is_there(self) -> bool:
        """True where a table has something to erase."""
        # A saved state may be the last to have it: after a crash, or behind what `keep` deletes.
        rows = self._silver.num_rows or self._saved.num_rows
        return bool(rows or any(map(self._anywhere, self.settings.inputs)))

    @property
    def partitions(self) -> set[int]:
        """The partitions in which the tables have the key."""
        places = chain.from_iterable(map(self._anywhere, self.settings.inputs))
        return {*self._silver["partition"].to_pylist(), *(p for p, _ in places)}

    # -- where it is

    @property
    def _key_conditions(self) -> list[Condition]:
        return of_key(self.key, self.tenant)

    @cached_property
    def _silver(self) -> pa.Table:
        columns = ["status", "event_time", *TENANT.names, "source", "topic", *_PLACE]
        gone: Condition = ("status", "in", [*tables.STATUSES])
        return self.reader.select(tables.SILVER, columns, [[gone, *self._key_conditions]])

    @cached_property
    def _read_back(self) -> int:
        """How many messages of the key were read back from the sink; their rows stay."""
        return row_count(
            self.reader, tables.SILVER, [[("status", "=", "out"), *self._key_conditions]]
        )

    @cached_property
    def _saved(self) -> pa.Table:
        names = ["_base", "partition", "tenant", "event_time"]
        if not self.reader.exists(tables.BASES):
            return tables.layout(self.settings)[tables.BASES].rows([]).select(names)
        return self.reader.select(tables.BASES, names, [self._key_conditions])

    @cached_property
    def _read(self) -> dict[InputId, Places]:
        where = [self._key_conditions]
        return {i: _places(self._in_table(i, where)) for i in self.settings.inputs}

    @cached_property
    def _unmerged(self) -> dict[InputId, Places]:
        """Heartbeats and skipped tombstones that have the key, by input.

        Heartbeats may be records of another source. The key is Kafka's key, or the value has it by
        the rules of any epoch of a source of the topic.
        """
        return self._with_key(_UNMERGED)

    def _in_table(self, input_id: InputId, where: Where) -> pa.Table:
        table = tables.bronze(input_id.source)
        return self.reader.select(table, _PLACE, of_topic(input_id, where))

    def _in_bronze(self, input_id: InputId) -> Places:
        places = (self._read, self._unmerged, self._refused)
        return [place for of_input in places for place in of_input[input_id]]

    def _anywhere(self, input_id: InputId) -> set[tuple[int, int]]:
        """Return the records of an input that any table has: of bronze, `keep` may have deleted
        them.
        """
        rows = self._silver
        is_its = (pc.equal(rows[name], text) for name, text in input_id._asdict().items())
        outcomes = _places(rows.filter(pc.and_(*is_its)))
        return {*self._in_bronze(input_id), *self._merged[input_id], *outcomes}

    @cached_property
    def _merged(self) -> dict[InputId, Places]:
        places: dict[InputId, Places] = {i: [] for i in self.settings.inputs}
        existing = self.reader.columns(tables.SILVER).names
        names = [name for name in part_columns(self.settings) if name in existing]
        with_parts: Condition = ("status", "in", _SENT)
        where = [[with_parts, *self._key_conditions]]
        rows = self.reader.rows(tables.SILVER, ["partition", *names], where)
        parts = places_of_parts(rows, self.settings.inputs)
        for tp, offsets in offsets_of(parts, self.settings.inputs).items():
            more = [(tp.partition, offset) for offset in offsets.tolist()]
            places[tp.input] = [*places[tp.input], *more]
        return places

    @cached_property
    def _refused(self) -> dict[InputId, Places]:
        """Refused records that have the key all the same, by input.

        The key is Kafka's key, or the value has it by the rules of any epoch.
        """
        return self._with_key([("reason", "is not null", None), NOT_FORGOTTEN])

    def _with_key(self, conditions: Sequence[Condition]) -> dict[InputId, Places]:
        """Return, by input, the records of bronze that meet the conditions and have the key, but
        not as merge key.

        For one tenant, these are the records whose value does not name another.
        """
        return {i: [*self._with_key_of(i, conditions)] for i in self.settings.inputs}

    def _with_key_of(
        self, input_id: InputId, conditions: Sequence[Condition]
    ) -> Iterator[tuple[int, int]]:
        table = tables.bronze(input_id.source)
        as_bytes = self.key.encode()
        readers = [other for other in self.settings.inputs if other.topic == input_id.topic]
        rules = [rules for reader in readers for rules in self._rules(reader.source)]
        of_tenant = (
            []
            if self.tenant is None
            else [replace(each, keys=((each.tenant or (),),), key_header=None) for each in rules]
        )
        candidates = self._in_table(input_id, [conditions])
        partitions, offsets = (int64s(candidates[name]) for name in _PLACE)
        for chunk in chunks_of(self.reader, input_id, table, partitions, offsets):
            rows = read_chunk(self.reader, chunk, [*_PLACE, *KEYED_BY], conditions)
            columns = rows["key"].to_pylist(), _keys(rows, rules), _keys(rows, of_tenant)
            for place, sent_key, keys, tenants in zip(_places(rows), *columns, strict=True):
                has_key = sent_key == as_bytes or self.key in keys
                if has_key and (not tenants or self.tenant in tenants):
                    yield place

    def _rules(self, source: str) -> list[ReadingRules]:
        epoch_rules: list[ReadingRules] = []
        for epoch in read_history(self.reader, self.settings).epochs:
            rules = epoch.settings.reading_rules(source)
            if source in (avro := avro_schemas(self.reader, epoch.settings)):
                rules = replace(rules, schema=avro[source])
            if rules not in epoch_rules:
                epoch_rules.append(rules)
        return epoch_rules

    # -- where it stays for longer

    def _further_copies(self) -> Iterator[dict[str, Any]]:
        """Yield where the key stays for longer: time travel and change files, and the topics.

        Each row has the number of records and their end (epoch ms), each None where it is unknown.
        """
        since = now_ms() if self.is_there else self._last_erased
        if since is not None:
            yield {
                "where": "time travel and change files",
                "records": None,
                "until": since + self.settings.retention_ms,
            }
        cluster = Cluster(self.settings.kafka)
        for input_id in self.settings.inputs:
            topic = input_id.topic
            places = sorted(self._anywhere(input_id))
            kept = self.settings.sources[input_id.source]
            first = cluster.bounds_of(topic, sorted({p for p, _ in places})) if places else {}
            remaining = sum(offset >= first[p][0] for p, offset in places)
            yield self._topic_row(cluster, topic, remaining)
            if kept.repartition is not None:  # bronze has read copies of what is, or was, there
                for topic in kept.repartition.from_topics:
                    yield self._topic_row(cluster, topic, len(places))
        for sequence in MERGED, CORRECTED:
            if (sent_to := topic_of(self.settings, sequence)) is not None:
                yield self._topic_row(cluster, sent_to, self._published(sequence, sent_to))
        for table, topic in self.settings.publish.dead_letter_topics.items():
            records = (
                self._silver["status"].to_pylist().count("late")
                if table == tables.LATE
                else sum(map(len, self._refused.values()))
            )
            yield self._topic_row(cluster, topic, records)

    @cached_property
    def _last_erased(self) -> int | None:
        """Where no table has the key, the last time (epoch ms) that any was forgotten, perhaps this
        one: then nothing says how many records of it there are elsewhere.
        """
        if self.is_there or not self.reader.exists(tables.ERASED):
            return None
        at: int | None = extreme(self.reader, tables.ERASED, "erased_at")
        return at

    def _published(self, sequence: sequences.Sequence, topic: str) -> int:
        tails = last_tails_in(self.reader, sequence, topic)
        last = {p: tail.place for p, tail in tails.items()}
        read_back = self._read_back if sequence is MERGED else 0
        if not last:
            return read_back
        where = [[*with_message(sequence), *self._key_conditions]]
        rows = self.reader.rows(sequence.table, ["partition", *sequence.order], where)
        return read_back + int(sequence.is_up_to(rows, last).sum())

    def _topic_row(self, cluster: Cluster, topic: str, records: int) -> dict[str, Any]:
        """Return a row about records that are, or may be, in a topic.

        `until`: if the topic has a retention, that long from now, at the latest.
        """
        until = None
        with suppress(KafkaAccessError):  # without DESCRIBE_CONFIGS, Kafka does not say
            topic_settings = cluster.topic_settings(topic) if records else {}
            if "delete" in topic_settings.get("cleanup.policy", ""):
                retention_ms = int(topic_settings["retention.ms"])
                until = now_ms() + retention_ms if retention_ms >= 0 else None
        found = records if self._last_erased is None else None
        return {"where": f"topic {topic}", "records": found, "until": until}

    # -- erasing

    def erase(self, owner: Owner) -> None:
        """Erase the key; what has been erased already is left out.

        Afterwards only older versions have files with it, which `maintain` removes once the
        retention is over.

        Bronze comes first: if the command is cut short, what silver still has is recognised by
        records that bronze no longer has.
        """
        self._note_places(owner)
        for input_id in self.settings.inputs:
            _blank(owner, input_id, self._read[input_id], {"heartbeat": True})
            _blank(owner, input_id, self._unmerged[input_id], {})
            _blank(owner, input_id, self._refused[input_id], {"detail": FORGOTTEN})
        self._erase(owner, tables.SILVER, self._silver)
        bases = read_history(self.reader, self.settings).bases
        for base in without_rows(self.reader, bases, self._saved["_base"].to_pylist()):
            owner.decide(BASE, base.body(), base.generation)
        self._erase(owner, tables.BASES, self._saved)
        if self.is_there:
            last = owner.history(self.settings).erased
            owner.decide(ERASED, {"last": last, "versions": owner.versions()})
        for name, table in owner.engine.lake.layout.items():
            if table.has_records:
                _retried(partial(owner.engine.purge, name))

    def _note_places(self, owner: Owner) -> None:
        """Note the places of the key's records in `erased`, and those of its merge records and
        corrections.

        Reading Kafka again must not bring the records back, even if `keep` has deleted their rows;
        and the topics may have the messages. Silver need not have had the merge record of a
        correction: late records have opened some, and `keep` deletes a merge record before the
        later of its corrections.
        """
        # Later rows get later times, so that the last of them tell which rows there are.
        now = max(now_ms(), owner.history(self.settings).erased + 1)
        sent = self._silver.filter(pc.is_in(self._silver["status"], pa.array(_SENT)))
        rows: list[tuple[Any, ...]] = [
            (None, None, p, None, now, time)
            for p, time in _distinct(sent, "partition", "event_time")
        ]
        rows += [
            (*input_id, p, at, now, None)
            for input_id in self.settings.inputs
            for p, at in sorted(self._anywhere(input_id))
        ]
        if rows:
            layout = owner.engine.lake.layout[tables.ERASED]
            owner.append(tables.ERASED, layout.rows(rows), DELETING)
            owner.decide(ERASED, {"last": now})

    def _erase(self, owner: Owner, table: str, rows: pa.Table) -> None:
        """Erase rows of the key by a MERGE: a DELETE would have the key in the table's log."""
        if not rows.num_rows:
            return
        names = ("partition", "tenant", "replaces")
        markers = [
            {**dict(zip(names, place, strict=True)), "merge_key": self.key}
            for place in _distinct(rows, "partition", "tenant", "event_time")
        ]
        layout = owner.engine.lake.layout[table]
        changed = pa.schema([*layout.schema, *((name, TIME) for name in REPLACING)])
        marked = replace(layout, schema=changed).rows_of(markers)
        engine = owner.engine
        _commit(owner, table, lambda commit: engine.merge(table, marked, commit, only_open=False))


_PLACE = ["partition", "offset"]
_SENT: Final = [*tables.statuses_of(tables.MERGED), *tables.statuses_of(tables.CORRECTIONS)]
"""The statuses of rows of which there may be messages."""
_UNMERGED: Sequence[Condition] = [("merge_key", "is null", None), ("reason", "is null", None)]


def _places(rows: pa.Table) -> Places:
    return list(row_values(rows, *_PLACE))


def _keys(rows: pa.Table, rules: Sequence[ReadingRules]) -> list[set[str | None]]:
    keys = (merge_keys(rows, each).to_pylist() for each in rules)
    return [{*row} - {None} for row in zip(*keys, strict=True)] or [set() for _ in range(len(rows))]


def _distinct(rows: pa.Table, *names: str) -> list[tuple[Any, ...]]:
    distinct = rows.group_by(list(names)).aggregate([])
    return sorted(row_values(distinct, *names))


def _blank(
    owner: Owner, input_id: InputId, places: Places, changed: Mapping[str, str | bool]
) -> None:
    table = tables.bronze(input_id.source)
    values = {**tables.emptied(owner.engine.lake.schema(table).names), **changed}
    [here] = of_topic(input_id)
    in_order = sorted(places)
    for begin in range(0, len(in_order), ROWS):
        offsets: dict[int, list[int]] = {}
        for p, offset in in_order[begin : begin + ROWS]:
            offsets.setdefault(p, []).append(offset)
        where = [
            [*here, ("partition", "=", p), ("offset", "in", partition_offsets)]
            for p, partition_offsets in offsets.items()
        ]
        _commit(owner, table, partial(owner.engine.update, table, where, values))


def _commit(owner: Owner, table: str, write: Callable[[Commit], None]) -> None:
    fault_point("forget.erase")
    owner.change(table, DELETING, write, attempts=ATTEMPTS)


def _retried(write: Callable[[], None]) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            write()
        except Exception as error:
            if attempt == ATTEMPTS or not is_conflict(error):
                raise
        else:
            return
