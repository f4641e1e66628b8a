"""Changes the rules of an existing lake.

It says first what changes and from which batch on, then records it as the next epoch. The epoch is
one decision of the journal. Before it is made, this process takes the layers from their owner, so
that no batch can follow the old rules afterwards; a run in progress ends. Once another process has
taken a layer, it is not made. The next
run, with the new rules, adds the columns that they need. If nothing changes, or a change is
refused, no layers are taken.

What `repartition` has written by the old rules lies in the partition of the key that these rules
give a record. So if rules of such a source change, `repartition` is fenced, and bronze reads by the
old rules what it has written, before the epoch begins. From then on `repartition` is refused until
it has the new rules, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from watersmeet.audit.validate import check_expressions, check_schemas
from watersmeet.configuration.sources import written
from watersmeet.core.dropped_fields import gained_fields, shown
from watersmeet.core.inputs import InputId, of_source
from watersmeet.core.plan import BatchPlan, TopicPartition
from watersmeet.core.schema_changes import refused_changes
from watersmeet.core.times import utc
from watersmeet.cycle import Cycle
from watersmeet.errors import ConfigurationError, Problem
from watersmeet.faults import fault_point
from watersmeet.kafka.cluster import Cluster, topics_of, unpartitioned
from watersmeet.kafka.publisher import REDRIVE, REPARTITION, fence_records
from watersmeet.lake import tables
from watersmeet.lake.history import Epochs, epoch_body, read_history
from watersmeet.lake.identity import changes, configured_identity, differences, rerouted
from watersmeet.lake.journal import RULES
from watersmeet.lake.lease import EVOLVE, change_under_way
from watersmeet.lake.location import Lake
from watersmeet.lake.newest import bronze_ends, dropped_in_lake, finders
from watersmeet.lake.progress import last_batch
from watersmeet.lake.recovered import read_back_until
from watersmeet.lake.table_reader import TableReader
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run, evolve_schema
from watersmeet.running.beginnings import has_own_corrections, used_topic
from watersmeet.running.next_offsets import NextOffsets
from watersmeet.settings import Settings


def preview(reader: TableReader, settings: Settings) -> dict[str, Any]:
    """Return the answer of `evolve --json`, without changing anything.

    - `changes`: the fields that change, before and after;
    - `problems`: what keeps the change from being made;
    - `epoch` and `from_batch`: the next epoch's number, and the batch of silver that it would begin
      with;
    - `fields`: of each source whose schema changes, the fields that records in bronze have and the
      schema lacks, and those that it gains: how many of the newest records (`of`) have each, and
      whether the new schema takes it up.
    - `read_first`: the repartitioned sources of which bronze first reads what is written.

    Raises ConfigurationError if there is no lake.
    """
    epochs = read_history(reader, settings).epochs
    last = last_batch(reader)
    changed = changes(epochs, settings)
    problems = differences(reader, configured_identity(settings)) or [
        *_problems(epochs, settings, changed),
        *_unfit_corrections(reader, epochs, settings),
        *_deleted_already(reader, epochs, settings, last),
        *_too_early(reader, changed, last, epochs, settings),
    ]
    next_batch = 0 if last is None else last.batch + 1
    return {
        "epoch": epochs.current.number + (1 if changed else 0),
        "from_batch": next_batch if changed else epochs.current.from_batch,
        "changes": [
            {"field": field, "before": written(before), "after": written(after)}
            for field, (before, after) in changed.items()
        ],
        "problems": [problem._asdict() for problem in problems],
        "fields": [] if problems else _fields(reader, epochs.current.settings, settings, changed),
        "read_first": rerouted(settings, changed),
        "applied": False,
    }


def _fields(
    reader: TableReader, before: Settings, after: Settings, changed: Mapping[str, tuple[Any, Any]]
) -> list[dict[str, Any]]:
    names = [name for name in before.sources if f"sources.{name}.schema" in changed]
    find = {name: of for name, of in finders(reader, before).items() if name in names}
    dropped = dropped_in_lake(reader, before, bronze_ends(reader, before), find) if find else {}
    rows = list[dict[str, Any]]()
    for name, found in dropped.items():
        old, new = before.sources[name].value_schema, after.sources[name].value_schema
        gained = gained_fields(old, new) if old and new else frozenset[str]()
        of_gained = found._replace(counts=Counter({field: found.counts[field] for field in gained}))
        others = [item for item in found.most_frequent if item[0] not in gained]
        for field, count in [*of_gained.by_frequency, *others]:
            row = {"source": name, "field": shown(field), "records": count, "of": found.records}
            rows.append({**row, "taken_up": field in gained})
    return rows


def evolve(reader: TableReader, settings: Settings, reporter: Reporter) -> dict[str, Any]:
    """Record the settings' rules as the lake's next epoch, and answer as `preview` does.

    Raises ConfigurationError if the change cannot be made, and LeaseTakenError if the layers cannot
    be taken.
    """
    answer = _applicable(reader, settings)
    # An `evolve` that was cut short still has the layers.
    if not answer["changes"] and change_under_way(reader, EVOLVE) is None:
        return answer
    of_lake = read_history(reader, settings).epochs.current.settings
    this_run = Run(of_lake, LAYERS, reporter, change=EVOLVE)
    with this_run.take_layers() as cycle:
        from_batch = cycle.silver.recover().state.next_batch
        answer = _applicable(reader, settings)  # a run may have merged a batch meanwhile
        if not answer["changes"]:
            return answer
        _read_to_the_end(this_run, cycle, answer["read_first"])
        fault_point("evolve.epoch")
        of_bronze = NextOffsets(reader, this_run.settings, this_run.partitions)
        next_offsets = {i: of_bronze.of(i) for i in settings.inputs}
        after = this_run.settings.under(
            {**settings.rules(), **_first_values(next_offsets, settings, answer)}
        )
        if after.has_ids:  # whoever knows the epoch may ask for the columns
            this_run.engine.lake = Lake(after)
            evolve_schema(this_run.engine, this_run.engine.lake.layout)
        number = read_history(reader, settings).epochs.current.number + 1
        since = {
            TopicPartition(i, p): at for i, its in next_offsets.items() for p, at in its.items()
        }
        cycle.owner.decide(RULES, epoch_body(after, number, from_batch, since))
        fault_point("evolve.release")
    return {**answer, "from_batch": from_batch, "applied": True}


def _applicable(reader: TableReader, settings: Settings) -> dict[str, Any]:
    answer = preview(reader, settings)
    if answer["problems"]:
        raise ConfigurationError(**answer["problems"][0])
    return answer


def _read_to_the_end(this_run: Run, cycle: Cycle, sources: Sequence[str]) -> None:
    # Producers of `repartition` and `redrive` are fenced first.
    settings = this_run.settings
    inputs = [input_id for input_id in settings.inputs if input_id.source in sources]
    for input_id in inputs:
        fence_records(settings, input_id.topic, REPARTITION, REDRIVE)
        Cluster(settings.kafka).settled_bounds(input_id.topic, this_run.partitions)
    if inputs:
        this_run.run_to_end(partial(cycle.read, inputs))


def _first_values(
    next_offsets: Mapping[InputId, Mapping[int, int]],
    settings: Settings,
    answer: Mapping[str, Any],
) -> dict[str, Any]:
    # Such values do not name their schema: it holds from bronze's next offsets on.
    changed = {change["field"] for change in answer["changes"]}
    rules: dict[str, Any] = {}
    for name, source in settings.sources.items():
        if source.is_bare_avro and f"sources.{name}.schema" in changed:
            [input_id] = of_source(settings.inputs, name)
            rules[f"sources.{name}.schema_since"] = {
                str(p): offset for p, offset in next_offsets[input_id].items()
            }
    return rules


def _too_early(
    reader: TableReader,
    changed: dict[str, tuple[Any, Any]],
    last: BatchPlan | None,
    epochs: Epochs,
    after: Settings,
) -> Iterator[Problem]:
    # The old rules of reading and grouping say which records are in the messages that were read
    # back from the sink of a lost lake. They stay until all of these messages are past.
    before = epochs.current.settings
    after = epochs.current.settings.under(after.rules())
    field = next((field for field in changed if not field.startswith("publish.")), None)
    if field is None or before.fingerprint == after.fingerprint:
        return
    if not reader.exists(tables.SILVER):
        return
    generations = read_history(reader, before).generations
    if not generations:
        return
    longest_ms = max(rules.merge.longest_ms for rules in (before, after))
    clocks = {} if last is None else last.clocks
    for p, until in read_back_until(reader, generations.newest, longest_ms).items():
        if clocks.get(p, 0) <= until:
            what = f"messages of the lost lake may still hold records of partition {p}"
            yield Problem(
                what, field, f"run the lake, and wait until its clock has passed {utc(until)}"
            )


def _unfit_corrections(
    reader: TableReader, epochs: Epochs, settings: Settings
) -> Iterator[Problem]:
    before = epochs.current.settings.publish.corrections_topic
    topic, field = settings.publish.corrections_topic, "publish.corrections.topic"
    if topic in (None, before):
        return
    if before is not None and has_own_corrections(reader, settings, before):
        what = f"the lake's corrections go to {before}, where their sequence goes on"
        yield Problem(what, field, "set it back; `within` and `max_versions` may change")
    elif not has_own_corrections(reader, settings, topic):
        counts = Cluster(settings.kafka).partition_counts(topics_of(settings))
        unfit = [error.problem for error in unpartitioned(settings, counts)]
        yield from unfit
        if not unfit and (used := used_topic(settings, topic, counts[settings.topics[0]])):
            what = f"{used}, so that corrections cannot begin there"
            yield Problem(what, field, "name a topic that never had a message")


def _deleted_already(
    reader: TableReader, epochs: Epochs, settings: Settings, last: BatchPlan | None
) -> Iterator[Problem]:
    # `keep` has left what the corrections of before need.
    needed_ms = settings.needed_to_correct_ms
    if needed_ms <= epochs.current.settings.needed_to_correct_ms:
        return
    clocks = {} if last is None else last.clocks
    floors = read_history(reader, settings).floors
    names = tables.SILVER, tables.LATE, tables.CORRECTIONS
    for p, floor in sorted(floors.last_of(*names).items()):
        if clocks.get(p, 0) <= floor + needed_ms:
            yield Problem(
                f"`keep` has deleted rows of partition {p} that corrections may need",
                "publish.corrections",
                "set it back, run the lake with a `keep` that is long enough for it, and wait "
                f"until its clock has passed {utc(floor + needed_ms)}",
            )


def _problems(
    epochs: Epochs, settings: Settings, changed: dict[str, tuple[Any, Any]]
) -> list[Problem]:
    if problems := check_schemas(settings):
        return problems
    for field, (before, after) in changed.items():
        if field.endswith(".schema"):
            fix = "leave what is there as it is, and add optional fields; or begin a new lake"
            source = settings.sources[field.split(".")[1]]
            if source.is_bare_avro and len(source.topics) > 1:
                what = (
                    "Avro without a registry does not say where in each of several topics another "
                    "schema begins"
                )
                problems.append(
                    Problem(
                        what,
                        field,
                        "leave the schema as it is; or begin a new lake, with a registry",
                    )
                )
            problems += [
                Problem(what, field, fix)
                for what in refused_changes(before, after, is_avro=source.format == "avro")
            ]
    if not problems:
        after = epochs.current.settings.under(settings.rules())
        problems = check_schemas(after) or check_expressions(after)
    return problems
