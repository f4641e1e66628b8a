"""Runs the demo and shows it: what went in, what the layers made of it, what came out, and what to try next."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

from confluent_kafka import Message
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

from pipelines import tables
from pipelines.adapters import broker
from pipelines.adapters.kafka import Cluster, read_to_end
from pipelines.adapters.lake import Lake
from pipelines.adapters.spark import layer_session, spark_session
from pipelines.audit.show import status_view, utc
from pipelines.audit.status import status
from pipelines.core.sequence import SEQ
from pipelines.demo import clickstream
from pipelines.errors import ConfigurationError
from pipelines.init import schemas_directory
from pipelines.observability import reporting
from pipelines.quality import check_silver
from pipelines.run import LAYERS, Run
from pipelines.settings import Settings, load_settings

_CONFIGURATION = """\
# The demo's configuration; `watersmeet init` writes one with every field explained.
name: demo
lake: ./lake
kafka:
  bootstrap_servers: {bootstrap_servers}
sources:
  tracking:
    topic: tracking
    schema: schemas/tracking.json
    key: ssid
    event_time: ts
    heartbeat: {{field: type, equals: heartbeat}}
  orders:
    topic: orders
    schema: schemas/orders.json
    key: ssid
    event_time: ts
    heartbeat: {{field: type, equals: heartbeat}}
merge:
  timeout: 30m
publish:
  topic: merged
  valid: "size(orders) > 0 OR size(tracking) > 1"   # a single click is no visit
"""


def run_demo(directory: Path) -> None:
    """Leaves the lake, its configuration and the broker's data in `directory`, and no process behind.

    A folder that an earlier demo left is made anew. Raises ConfigurationError where the folder holds something else.
    """
    console = Console()
    _make_room(directory)
    try:
        started = broker.start(directory / "broker")
        assert started.bootstrap_servers is not None
        configuration = _write_configuration(directory, started.bootstrap_servers)
        settings = load_settings(configuration)
        produced = clickstream.produce(settings.kafka)
        with reporting() as reporter:
            Run(settings, LAYERS, reporter, threading.Event()).once()
        key = _show(console, settings, produced)
    finally:
        broker.stop(directory / "broker")
    _show_next_steps(console, directory, configuration, key)


def _make_room(directory: Path) -> None:
    configuration = directory / "watersmeet.yml"
    if configuration.is_file() and configuration.read_text().startswith("# The demo's configuration"):
        broker.stop(directory / "broker")
        shutil.rmtree(directory)
    elif directory.exists() and any(directory.iterdir()):
        raise ConfigurationError(f"{directory} is not empty and not the work of an earlier demo; name another folder with --dir")


def _write_configuration(directory: Path, bootstrap_servers: str) -> Path:
    (directory / "schemas").mkdir(parents=True)
    for name in ("tracking.json", "orders.json"):
        shutil.copy(schemas_directory() / name, directory / "schemas" / name)
    configuration = directory / "watersmeet.yml"
    configuration.write_text(_CONFIGURATION.format(bootstrap_servers=bootstrap_servers))
    return configuration


def _show(console: Console, settings: Settings, produced: dict[str, int]) -> str:
    """What came out; returns the key of a merge record that is worth a closer look."""
    lake = Lake(layer_session(spark_session()), settings)
    cluster = Cluster(settings.kafka)
    consumer = cluster.consumer()
    topic = settings.publish.topic
    messages = [m for p in range(clickstream.PARTITIONS) for m in read_to_end(consumer, topic, p)]
    consumer.close()
    _headline(console, "Where the records went")
    console.print(_outcomes(lake, settings, produced))
    _headline(console, "Merge records: a session's clicks beside its order (from silver)")
    examples = _with_orders(lake)
    for row in examples:
        console.print(_visit(row), "")
    _headline(console, f"Published: the topic `{topic}` as a consumer reads it ({len(messages)} messages)")
    console.print(_sequence(messages))
    _headline(console, "The clock (watersmeet status)")
    console.print(status_view(status(lake, settings)))
    _headline(console, "What silver is expected to be (Great Expectations)")
    console.print(_expectations(lake, settings))
    return str(examples[0].merge_key)


def _headline(console: Console, text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]\n", highlight=False)


def _outcomes(lake: Lake, settings: Settings, produced: dict[str, int]) -> Table:
    """Every record of a topic ends in exactly one column."""
    table = Table("topic", box=None, header_style="dim")
    for name in ("in Kafka", "in bronze", "merged", "late", "quarantined", "heartbeats", "waiting"):
        table.add_column(name, justify="right")
    silver = lake.read(tables.SILVER)
    for name, source in settings.sources.items():
        bronze = lake.read(tables.bronze(name)).agg(F.count(F.lit(1)), F.count_if("heartbeat")).collect()[0]
        merged = silver.agg(F.coalesce(F.sum(F.size(name)), F.lit(0))).collect()[0][0]
        late = lake.read(tables.LATE).where(F.col("source") == name).count()
        quarantined = lake.read(tables.QUARANTINE).where(F.col("source") == name).count()
        waiting = bronze[0] - bronze[1] - merged - late - quarantined
        counts = (produced[source.topic], bronze[0], merged, late, quarantined, bronze[1], waiting)
        table.add_row(source.topic, *[f"{count:,}" for count in counts])
    return table


def _with_orders(lake: Lake) -> list[Any]:
    """A few finished records that have both, the ones with most orders first."""
    silver = lake.read(tables.SILVER).where("status = 'timed_out' AND size(orders) > 0 AND size(tracking) > 0")
    return silver.orderBy(F.size("orders").desc(), "event_time", "merge_key").limit(3).collect()


def _visit(row: Any) -> Table:
    began, ended = (round(t.timestamp() * 1000) for t in (row.event_time, row.last_event_time))
    title = f"session {row.merge_key}, {utc(began)} to {utc(ended)}"
    table = Table("event time", "tracking", "orders", title=title, title_justify="left", box=None, header_style="dim")
    parts = [(p.event_time, 0, f"{p.value.type} {p.value.aid}") for p in row.tracking]
    parts += [(p.event_time, 1, f"{p.value.type} {p.value.aid}") for p in row.orders]
    parts.sort()
    for time, column, text in parts[-8:]:
        table.add_row(utc(round(time.timestamp() * 1000)), *([text, ""] if column == 0 else ["", f"[bold]{text}[/]"]))
    if len(parts) > 8:
        table.caption = f"(and {len(parts) - 8} before)"
    return table


def _sequence(messages: list[Message]) -> Table:
    table = Table("partition", "seq", "event time", "key", "tracking", "orders", box=None, header_style="dim")
    for partition in range(clickstream.PARTITIONS):
        mine = [message for message in messages if message.partition() == partition]
        for message in [*mine[:4], *mine[-1:]]:
            value = json.loads(message.value() or b"{}")
            headers: dict[str, Any] = dict(message.headers() or [])
            table.add_row(
                str(partition),
                headers[SEQ].decode(),
                utc(message.timestamp()[1]),
                (message.key() or b"").decode(),
                _summary(value["tracking"]),
                _summary(value["orders"]),
            )
    return table


def _summary(values: list[dict[str, Any]]) -> str:
    kinds = [value["type"] for value in values]
    return ", ".join(f"{kinds.count(kind)} {kind}{'s' if kinds.count(kind) > 1 else ''}" for kind in dict.fromkeys(kinds)) or "-"


def _expectations(lake: Lake, settings: Settings) -> Table:
    table = Table("expectation", "holds", "rows against it", box=None, header_style="dim")
    for result in check_silver(lake.read(tables.SILVER), settings):
        table.add_row(result.expectation, "[green]yes[/]" if result.ok else "[red]no[/]", f"{result.unexpected:,}")
    return table


def _show_next_steps(console: Console, directory: Path, configuration: Path, key: str) -> None:
    program = Path(".venv/bin")
    silver = directory / "lake" / tables.SILVER
    read = f"spark_session().read.format('delta').load('{silver}').show()"
    _headline(console, f"The lake stays in {directory}. Five commands to try next:")
    for command in (
        f"{program}/watersmeet broker start --dir {directory}/broker",
        f"{program}/watersmeet status -c {configuration}",
        f"{program}/watersmeet explain {key} -c {configuration}",
        f"{program}/watersmeet report --out {directory}/report.html -c {configuration}",
        f'{program}/python -c "from pipelines.adapters.spark import spark_session; {read}"',
    ):
        console.print(f"  {command}", highlight=False, soft_wrap=True)
