"""The examples that the documentation explains: what `try` shows of them is what a run on a broker
makes of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, QueryBuilder

from tests.support.commands import in_process
from tests.support.corrections import corrections_in
from tests.support.topics import create_topics, produce, published
from watersmeet.audit.rebuild import rebuild
from watersmeet.audit.verify import verify
from watersmeet.core.window import Window
from watersmeet.dry_run import try_file
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake
from watersmeet.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/watersmeet.yml"))


@pytest.fixture
def example(kafka: str, tmp_path: Path, request: pytest.FixtureRequest) -> Settings:
    """An example of its own on the broker, with topics of its own, everything sent and merged."""
    shutil.copytree(ROOT / "examples" / request.param, tmp_path / "example")
    file = tmp_path / "example" / "watersmeet.yml"
    config = yaml.safe_load(file.read_text())
    config["kafka"]["bootstrap_servers"] = kafka
    publish = config["publish"]
    corrections = [publish["corrections"]] if "corrections" in publish else []
    for part in (*config["sources"].values(), publish, *corrections):
        part["topic"] = f"{tmp_path.name}-{part['topic']}"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    create_topics(kafka, *{source["topic"] for source in config["sources"].values()}, partitions=1)
    for record in records(request.param):
        produce(
            kafka,
            config["sources"][record["source"]]["topic"],
            [(0, orjson.dumps(record["value"]))],
        )
    done = in_process("run", "--once", cwd=file.parent)
    assert done.returncode == 0, done.stderr
    return load_settings(file)


def records(name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (ROOT / "examples" / name / "records.jsonl").read_text().splitlines()
    ]


def explained(name: str) -> Iterator[dict[str, str]]:
    """The rows of the example's table in the documentation, by the titles of its columns."""
    text = (ROOT / "docs/examples.md").read_text()
    rest = text[text.index(f"cd examples/{name}") :]
    titles: list[str] = []
    for line in rest[rest.index("\n| ") :].strip().splitlines():
        if not line.startswith("|"):
            return
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        titles = titles or cells
        if line[2].isdigit():
            yield dict(zip(titles, cells, strict=True))


FOR_EVERY_CHANGE = ["ads", "tenants"]
"""The examples that have most of what the others have."""


@pytest.mark.parametrize(
    "example",
    [
        name if name in FOR_EVERY_CHANGE else pytest.param(name, marks=pytest.mark.long)
        for name in EXAMPLES
    ],
    indirect=True,
)
def test_a_run_makes_of_an_example_what_try_shows(example: Settings, tmp_path: Path) -> None:
    shown = try_file(
        tmp_path / "example" / "watersmeet.yml", tmp_path / "example" / "records.jsonl", close=False
    )
    messages = published(example.kafka.bootstrap_servers, example.publish.topic, 1)
    expected = [
        (row["seq"], row["key"].encode(), row["value"].encode()) for row in shown["messages"]
    ]
    assert [(message.seq, message.key, message.value) for message in messages] == expected
    assert messages
    reader = DeltaRsReader(Lake(example))
    late = [
        (row["source"], row["offset"])
        for row in reader.select(tables.LATE, ["source", "offset"]).to_pylist()
    ]
    assert sorted(late) == sorted((row["source"], row["offset"]) for row in shown["late"])
    rows = [
        (row["merge_key"], row["status"])
        for row in reader.select(tables.MERGED, ["merge_key", "status"]).to_pylist()
    ]
    assert sorted(rows) == sorted((row["key"], row["status"]) for row in shown["records"])
    assert verify(reader, example, full=True) == {"ok": True, "problems": []}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_record_of_an_example_is_explained(name: str) -> None:
    """By its line, what it is, its session, its time and its tenant; and what is late says so."""
    rows, sent = list(explained(name)), records(name)
    assert [int(row["line"]) for row in rows] == list(range(1, len(sent) + 1))
    for row, record in zip(rows, sent, strict=True):
        value = record["value"]
        assert row["at"] == value["at"][11:16]
        assert int(row.get("day", "1")) == int(value["at"][8:10])
        assert row["session"] == value.get("session", "–")
        assert row.get("shop", "–") == value.get("shop", "–")
        assert (
            row.get("type") == value.get("type")
            if name == "one-topic"
            else row["topic"].strip("`") == record["source"]
        )
    folder = ROOT / "examples" / name
    late = {
        row["line"]
        for row in try_file(folder / "watersmeet.yml", folder / "records.jsonl", close=False)[
            "late"
        ]
    }
    said = {
        n
        for row in rows
        for cell in list(row.values())[4:]
        for n in _late_lines(int(row["line"]), cell)
    }
    assert said == late


def _late_lines(line: int, cell: str) -> list[int]:
    """Which lines are late, as a cell of this line says: that one, or another one by its number."""
    others = [int(number) for number in re.findall(r"Line (\d+) is late", cell)]
    is_late = ": late" in cell or cell.startswith("late")
    return others + [line] * is_late


CORRECTED = [("bo", 1, 1, 1), ("dee", 1, 0, 1), ("cy", 1, 1, 1), ("bo", 2, 1, 2)]
"""The corrections that the page tells of, in order: key, version, and how many clicks and
conversions."""


@pytest.mark.parametrize("example", ["ads"], indirect=True)
def test_a_consumer_of_both_topics_has_what_a_timeout_of_a_week_would_merge(
    example: Settings, tmp_path: Path
) -> None:
    servers = example.kafka.bootstrap_servers
    corrections = example.publish.corrections_topic or ""
    assert [
        (key, version, len(value["clicks"]), len(value["conversions"]))
        for _, key, _, version, _, value in sorted(
            corrections_in(servers, corrections, 1), key=itemgetter(2)
        )
    ] == CORRECTED
    program = [sys.executable, str(ROOT / "examples/ads/consumer.py"), servers, "versions.db"]
    program += [example.publish.topic, corrections]
    for _ in range(2):  # called again, it goes on where it ended
        done = subprocess.run(
            program, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
    kept = [json.loads(line) for line in done.stdout.splitlines()]
    rebuild(DeltaRsReader(Lake(example)), example, tmp_path / "week", Window(7 * 24 * 3_600_000))
    columns = ["merge_key", "event_time", "last_event_time", *example.sources]
    week = QueryBuilder().register("silver", DeltaTable(str(tmp_path / "week" / "silver")))
    query = f"SELECT {', '.join(columns)} FROM silver WHERE status IN ('open', 'timed_out')"
    rows = pa.table(week.execute(query)).to_pylist()
    assert sorted(kept, key=itemgetter("key")) == sorted(
        map(_as_value, rows), key=itemgetter("key")
    )


def _as_value(row: dict[str, Any]) -> dict[str, Any]:
    """A row of silver as the value of a message."""
    times = {
        name: round(row[name].timestamp() * 1000) for name in ("event_time", "last_event_time")
    }
    parts = {
        source: [json.loads(part["value"]) for part in row[source]]
        for source in ("clicks", "conversions")
    }
    return {"key": row["merge_key"], **times, **parts}
