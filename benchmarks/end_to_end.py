"""How long the whole river takes: a backlog of two topics, from process start to the last published message.

The input is made up, the same in every run: sessions of ten clicks and one order each, in event-time order over a day of
event time, timed out after ten minutes. Producing it is not timed. `watersmeet run --once` is, as a process of its own, with
every table written; what it published is then counted. Prints one JSON document with the figures and the machine.

    python -m benchmarks.end_to_end --tracking 1000000 --orders 100000 --partitions 4
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from confluent_kafka import Producer

from pipelines.adapters import broker
from pipelines.adapters.kafka import Cluster, client_options, read_to_end
from pipelines.settings import load_settings

DAY_MS = 86_400_000
SESSION_MS = 300_000
START_MS = 1_767_225_600_000

CONFIGURATION = """\
name: bench
lake: ./lake
kafka: {{bootstrap_servers: "{bootstrap_servers}"}}
sources:
  tracking: {{topic: tracking, key: ssid, event_time: ts, heartbeat: {{field: type, equals: heartbeat}}}}
  orders: {{topic: orders, key: ssid, event_time: ts, heartbeat: {{field: type, equals: heartbeat}}}}
merge: {{timeout: 10m, max_records_per_batch: {max_records}}}
publish: {{topic: merged}}
"""


def records(tracking: int, orders: int, partitions: int) -> Iterator[tuple[str, int, int, str]]:
    """(topic, partition, event time, value), in order of event time, with closing heartbeats that time everything out."""
    rng = random.Random(1)
    sessions = orders
    begun = [START_MS + rng.randrange(DAY_MS) for _ in range(sessions)]
    timed = [(begun[i % sessions] + rng.randrange(SESSION_MS), "tracking", i % sessions) for i in range(tracking)]
    timed += [(begun[i] + SESSION_MS, "orders", i) for i in range(orders)]
    timed.sort()
    for t, topic, session in timed:
        value = {"ssid": f"s{session:08d}", "ts": t, "type": topic, "aid": rng.randrange(1_800_000), "page": "/article/view"}
        yield topic, session % partitions, t, json.dumps(value)
    for topic in ("tracking", "orders"):
        for partition in range(partitions):
            end = START_MS + 2 * DAY_MS
            yield topic, partition, end, json.dumps({"type": "heartbeat", "ts": end})


def main() -> None:
    """Parses, makes the input, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tracking", type=int, default=1_000_000)
    parser.add_argument("--orders", type=int, default=100_000)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--max-records-per-batch", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="watersmeet-bench-") as name:
        folder = Path(name)
        started = broker.start(folder / "broker")
        try:
            print(json.dumps(measure(folder, str(started.bootstrap_servers), options), indent=2))
        finally:
            broker.stop(folder / "broker")


def measure(folder: Path, bootstrap_servers: str, options: argparse.Namespace) -> dict[str, object]:
    """Fills the topics, runs the pipeline once, and returns the figures."""
    configuration = folder / "watersmeet.yml"
    configuration.write_text(CONFIGURATION.format(bootstrap_servers=bootstrap_servers, max_records=options.max_records_per_batch))
    settings = load_settings(configuration)
    cluster = Cluster(settings.kafka)
    for topic in ("tracking", "orders"):
        cluster.create_topic(topic, options.partitions, {"retention.ms": "-1"})
    producer = Producer({**client_options(settings.kafka), "linger.ms": 50, "queue.buffering.max.messages": 1_000_000})
    produced, produced_bytes = 0, 0
    for topic, partition, event_time, value in records(options.tracking, options.orders, options.partitions):
        while True:
            try:
                producer.produce(topic, value, partition=partition, timestamp=event_time)
                break
            except BufferError:
                producer.poll(0.1)
        produced, produced_bytes = produced + 1, produced_bytes + len(value)
    producer.flush()
    print(f"{produced:,} records produced; running ...", file=sys.stderr)

    began = time.time()
    command = [sys.executable, "-m", "pipelines", "run", "--once", "-c", str(configuration)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    seconds = time.time() - began
    if done.returncode != 0:
        sys.exit(f"the run failed: {done.stderr}")
    consumer = cluster.consumer()
    published = sum(len(read_to_end(consumer, "merged", p)) for p in range(options.partitions))
    consumer.close()
    lake_bytes = sum(path.stat().st_size for path in (folder / "lake").rglob("*") if path.is_file())
    return {
        "records": produced,
        "published": published,
        "seconds": round(seconds, 1),
        "records_per_second": round(produced / seconds),
        "seconds_until_the_last_news_of": _steps(done.stderr, began),
        "lake_bytes_per_input_byte": round(lake_bytes / produced_bytes, 2),
        "partitions": options.partitions,
        "max_records_per_batch": options.max_records_per_batch,
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def _steps(log: str, began: float) -> dict[str, float]:
    """When each layer was last heard of, in seconds from the start of the process: where the time goes."""
    steps = {}
    for stamp, layer in re.findall(r"^(\S+ \S+) INFO watersmeet: ([^:]+): ", log, re.MULTILINE):
        steps[layer] = round(datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp() - began, 1)
    return steps


if __name__ == "__main__":
    main()
