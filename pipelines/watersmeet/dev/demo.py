"""The demo: it runs the layers and shows what went in, what came out, and what to try next.

Its input are shop sessions as two topics, in event-time order, with heartbeats.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from watersmeet.ask.answers import quoted, rows
from watersmeet.ask.status import status
from watersmeet.audit.show import check_view, status_view
from watersmeet.core.sequence import SEQ
from watersmeet.core.times import epoch_ms, utc
from watersmeet.dev import broker
from watersmeet.dev.init import write_example
from watersmeet.dev.send import send_records
from watersmeet.dry_run import SentRecord
from watersmeet.engine import Engine
from watersmeet.errors import BrokerError, ConfigurationError, MissingPackageError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake.table_reader import TableReader
from watersmeet.monitoring.observability import reporting, working
from watersmeet.output import print_text, print_view
from watersmeet.quality.check import check
from watersmeet.quality.suites import read_suites
from watersmeet.run import LAYERS, Run
from watersmeet.running.owner import now_ms
from watersmeet.settings import KafkaSettings, Settings, load_settings

SESSIONS = Path(__file__).with_name("otto") / "sessions.jsonl"
PARTITIONS = 2
HEARTBEAT_EVERY_MS = 3_600_000
"""Interval of each topic's heartbeats: without them, rare orders would stop the clock."""

TOPICS = ("tracking", "orders")
_TYPES = {
    "clicks": ("tracking", "click"),
    "carts": ("tracking", "cart"),
    "orders": ("orders", "order"),
}

_MARK = "# The demo's configuration"
_MARKER = ".demo"
"""File that is in a demo's folder from its first moment to its last."""
_FIRST_SHOWN = 4  # messages of a partition; its last one is shown, too
_PARTS_SHOWN = 8  # of a merge record
_OF_BRONZE = (
    "SELECT count(*) AS n, sum(CASE WHEN heartbeat THEN 1 ELSE 0 END) AS heartbeats, "
    "sum(CASE WHEN reason IS NULL THEN 0 ELSE 1 END) AS refused FROM bronze_{}"
)
# The finished records that have parts of both sources, those with most orders first.
_WITH_ORDERS = (
    "SELECT merge_key, event_time, last_event_time, tracking, orders FROM merged "
    "WHERE status = 'timed_out' AND cardinality(tracking) > 0 AND cardinality(orders) > 0 "
    "ORDER BY cardinality(orders) DESC, event_time, merge_key LIMIT 3"
)


def run_demo(directory: Path, engine: str) -> None:
    """Run the demo; leave its lake and data in `directory`, anew, and no process behind.

    Raises ConfigurationError where the folder holds something else than an earlier demo.
    """
    _make_room(directory)
    try:
        with working("starts a broker of Kafka"):
            servers = broker.start(directory / "broker").bootstrap_servers
        if servers is None:
            raise BrokerError(
                f"the broker in {directory / 'broker'} ended at once",
                fix=f"see {directory / 'broker' / 'broker.log'}",
            )
        configuration = _write_configuration(directory, servers, engine)
        settings = load_settings(configuration)
        with working("sends the records to the broker"):
            produced = _produce(settings.kafka)
        with reporting() as reporter:
            this_run = Run(settings, LAYERS, reporter)
            this_run.once()
        key = _show(settings, this_run.engine, produced)
    finally:
        broker.stop(directory / "broker")
    _show_next_steps(directory, configuration, key)


def _make_room(directory: Path) -> None:
    marker, configuration = directory / _MARKER, directory / "watersmeet.yml"
    try:
        if _is_of_demo(configuration) or (marker.exists() and not configuration.exists()):
            marker.touch()  # it goes last: whoever ends this midway can call it again
            broker.stop(directory / "broker")
            for each in directory.iterdir():
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each)
                elif each != marker:
                    each.unlink()
        elif directory.exists() and any(directory.iterdir()):
            raise ConfigurationError(
                f"{directory} is not empty and not the work of an earlier demo",
                fix="name another folder with --dir",
            )
        directory.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        raise ConfigurationError(
            f"cannot be written to ({error.strerror})",
            where=directory,
            fix="name a folder that can",
        ) from None


def _is_of_demo(configuration: Path) -> bool:
    return configuration.is_file() and configuration.read_bytes().startswith(_MARK.encode())


def _write_configuration(directory: Path, bootstrap_servers: str, engine: str) -> Path:
    configuration = write_example(directory, engine)[0]
    example = configuration.read_text().replace("127.0.0.1:9092", bootstrap_servers)
    configuration.write_text(f"{_MARK}: the example that `watersmeet init` writes.\n{example}")
    return configuration


class Event(NamedTuple):
    """A record to produce, with its event time."""

    time: int
    topic: str
    partition: int
    value: dict[str, int | str]


def events() -> list[Event]:
    """Return all records by event time; the last heartbeats leave the newest event open."""
    records = []
    for line in map(json.loads, SESSIONS.read_text().splitlines()):
        for event in line["events"]:
            topic, kind = _TYPES[event["type"]]
            value = {"type": kind, "ssid": line["session"], "aid": event["aid"], "ts": event["ts"]}
            records.append(Event(event["ts"], topic, line["session"] % PARTITIONS, value))
    first = min(event.time for event in records)
    last = max(event.time for event in records)
    for time, topic, partition in product(
        [*range(first, last, HEARTBEAT_EVERY_MS), last], TOPICS, range(PARTITIONS)
    ):
        records.append(Event(time, topic, partition, {"type": "heartbeat", "ts": time}))
    return sorted(records, key=lambda event: event.time)


def _produce(kafka: KafkaSettings) -> Counter[str]:
    cluster = Cluster(kafka)
    for topic in TOPICS:
        # The data are years old and carry their own time: retention by age would delete them.
        cluster.create_topic(topic, PARTITIONS, {"retention.ms": "-1"})
    records = [
        SentRecord(e.topic, e.partition, e.time, None, json.dumps(e.value).encode(), [])
        for e in events()
    ]
    send_records(kafka, ((record.topic, record) for record in records))
    return Counter(record.topic for record in records)


def _show(settings: Settings, engine: Engine, produced: dict[str, int]) -> str:
    reader = engine.reader
    topic = settings.publish.topic
    messages = _messages(settings)
    _headline("Where the records went")
    print_view(_outcomes(reader, settings, produced))
    _headline("Merge records: a session's clicks beside its order (from silver)")
    examples = rows(reader, _WITH_ORDERS)
    for row in examples:
        print_view(Group(*_visit(row), ""))
    _headline(f"Published: the topic `{topic}` as a consumer reads it ({len(messages)} messages)")
    print_view(_sequence(messages))
    _headline("The clock (watersmeet status)")
    print_view(status_view(status(reader, settings)))
    _headline("What the data is expected to be (watersmeet check, by Great Expectations)")
    try:
        with working("checks the expectations"):
            done = check(engine, settings, read_suites(settings), now_ms())
        print_view(check_view(done.document()))
    except MissingPackageError as error:
        print_text(f"  {error}")
    return str(examples[0]["merge_key"])


def _messages(settings: Settings) -> list[dict[str, Any]]:
    topic = settings.publish.topic
    bounds = Cluster(settings.kafka).settled_bounds(topic, PARTITIONS)
    messages = []
    for partition, offsets in sorted(bounds.items()):
        for batch in read_range(settings.kafka, Range(topic, partition, *offsets)):
            messages += batch.to_pylist()
    return messages


def _headline(text: str) -> None:
    print_view(f"\n[bold cyan]{text}[/]\n")


def _outcomes(reader: TableReader, settings: Settings, produced: dict[str, int]) -> Table:
    # Every record of a topic has exactly one outcome.
    table = Table("topic", box=None, header_style="dim")
    for name in ("in Kafka", "in bronze", "merged", "late", "quarantined", "heartbeats", "waiting"):
        table.add_column(name, justify="right")
    for name, source in settings.sources.items():
        [bronze] = rows(reader, _OF_BRONZE.format(name))
        [merged] = rows(reader, f"SELECT sum(cardinality({quoted(name)})) AS n FROM merged")
        [late] = rows(reader, f"SELECT count(*) AS n FROM late WHERE source = '{name}'")
        outcomes = (merged["n"] or 0, late["n"], bronze["refused"], bronze["heartbeats"])
        in_kafka = sum(produced[topic] for topic in source.topics)
        counts = (in_kafka, bronze["n"], *outcomes, bronze["n"] - sum(outcomes))
        table.add_row(", ".join(source.topics), *[f"{count:,}" for count in counts])
    return table


def _visit(row: dict[str, Any]) -> tuple[RenderableType, ...]:
    title = f"session {row['merge_key']}, {utc(row['event_time'])} to {utc(row['last_event_time'])}"
    table = Table("event time", "tracking", "orders", box=None, header_style="dim")
    parts = sorted(
        (epoch_ms(part["event_time"]), column, f"{part['value']['type']} {part['value']['aid']}")
        for column, source in enumerate(("tracking", "orders"))
        for part in row[source]
    )
    # The visit may go on long after its last order, which is what is to be seen.
    last_order = max(number for number, (_, column, _) in enumerate(parts) if column == 1)
    end = min(len(parts), max(_PARTS_SHOWN, last_order + 2))
    begin = max(0, end - _PARTS_SHOWN)
    for time, column, text in parts[begin:end]:
        table.add_row(utc(time), *([text, ""] if column == 0 else ["", f"[bold]{text}[/]"]))
    before = (f" (and {begin} before)",) if begin else ()
    after = (f" (and {len(parts) - end} after)",) if end < len(parts) else ()
    return title, *before, table, *after


def _sequence(messages: list[dict[str, Any]]) -> Table:
    table = Table("partition", "seq", "event time", "key", "value", box=None, header_style="dim")
    for partition in range(PARTITIONS):
        in_partition = [message for message in messages if message["partition"] == partition]
        last = len(in_partition) - 1
        for number, message in enumerate(in_partition):
            if number == _FIRST_SHOWN < last:
                table.add_row(str(partition), "...", f"{last - _FIRST_SHOWN:,} more")
            if _FIRST_SHOWN <= number < last:
                continue
            headers = {header["key"]: header["value"] for header in message["headers"]}
            seq = headers[SEQ].decode()
            time = utc(epoch_ms(message["kafka_timestamp"]))
            value = message["value"].decode()
            shown = f"{value[:60]}..." if sys.stdout.isatty() else value
            table.add_row(str(partition), seq, time, message["key"].decode(), Text(shown))
    return table


def _show_next_steps(directory: Path, configuration: Path, key: str) -> None:
    program = Path(sys.prefix, "bin")
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    _headline(f"The lake stays in {directory}. Six commands to try next:")
    by_status = "SELECT status, count(*) AS records FROM merged GROUP BY status"
    for command in (
        f"{program}/watersmeet broker start --dir {directory}/broker",
        f"{program}/watersmeet status -c {configuration}",
        f"{program}/watersmeet explain {key} -c {configuration}",
        f'{program}/watersmeet sql "{by_status}" -c {configuration}',
        f"{program}/watersmeet check --since 0 --html {directory}/quality.html -c {configuration}",
        f"{program}/watersmeet report --out {directory}/report.html -c {configuration}",
    ):
        print_text(f"  {command}")
