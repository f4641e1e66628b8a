"""The page of the first steps, command by command, and `broker send`, which it is made with."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SHARED_FOLDER
from tests.support.commands import in_process
from tests.support.topics import consume, published
from tests.unit.test_docs import FIRST_STEPS, blocks
from watersmeet.dev import broker
from watersmeet.dev.init import write_example
from watersmeet.dev.processes import free_port

pytestmark = pytest.mark.long


def test_the_page_shows_what_its_commands_do(tmp_path: Path) -> None:
    port = str(free_port())
    answers = dict[str, str]()
    try:
        for line in "".join(blocks(FIRST_STEPS, "bash")).splitlines():
            program, *arguments = shlex.split(line, comments=True)
            if program == "echo":
                text, _, name = arguments
                (tmp_path / name).write_text(text)
            elif program.endswith("watersmeet"):
                words = [word.replace("9092", port) for word in arguments]
                done = in_process(*words, cwd=tmp_path)
                assert done.returncode == 0, done.stderr
                answers.setdefault(words[0], done.stdout)
            if arguments[:1] == ["init"]:
                file = tmp_path / "shop" / "watersmeet.yml"
                file.write_text(file.read_text().replace("9092", port))
            if arguments[:2] == ["run", "--once"]:
                messages = published(f"127.0.0.1:{port}", "merged", 1)
    finally:
        broker.stop(tmp_path / "shop" / "broker", timeout_s=10)
    for shown in blocks(FIRST_STEPS, ""):
        command = {"records": "try", "partition": "status"}.get(shown.split()[0].rstrip(":"))
        if command is not None:
            assert shown.split() == answers[command].split()[: len(shown.split())]
    [values] = [block for block in blocks(FIRST_STEPS, "") if block.startswith("key 7")]
    assert [message.value.decode() for message in messages if message.value] == [
        "".join(line.strip() for line in lines)
        for _, *lines in map(str.splitlines, values.split("\n\n"))
    ]


CLICK = {"type": "click", "ssid": 7, "aid": 11, "ts": 1}


@pytest.fixture
def shop(tmp_path: Path, kafka: str, request: pytest.FixtureRequest) -> Path:
    """The folder of an example with topics of the test's own, and with the tests' broker."""
    write_example(tmp_path)
    file = tmp_path / "watersmeet.yml"
    text = file.read_text()
    for source in ("tracking", "orders"):
        text = text.replace(f"topic: {source}", f"topic: {topic(tmp_path, source)}")
    file.write_text(text)
    (tmp_path / "broker").symlink_to(request.config.stash[SHARED_FOLDER] / "broker")
    assert kafka
    return tmp_path


def topic(shop: Path, source: str) -> str:
    return f"{shop.name}_{source}"


def send(shop: Path, *records: Any) -> subprocess.CompletedProcess[str]:
    (shop / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    return in_process("broker", "send", "records.jsonl", "--json", cwd=shop)


def test_records_arrive_as_the_file_has_them_and_missing_topics_are_created(
    shop: Path, kafka: str
) -> None:
    both = {name: topic(shop, name) for name in ("tracking", "orders")}
    full = {"partition": 2, "key": "ä", "timestamp": 5, "headers": {"h": "x"}, "value": "no JSON"}
    done = send(
        shop,
        {"source": "tracking", **full},
        {"source": "tracking", "partition": 2, "timestamp": 0, "value": None},
        {"source": "tracking", "value": CLICK},
    )
    answer = json.loads(done.stdout)
    assert answer == {
        "bootstrap_servers": kafka,
        "created": [*both.values()],
        "sent": {both["tracking"]: 3},
    }
    assert consume(kafka, both["orders"], 3) == []
    found = consume(kafka, both["tracking"], 3)
    assert [
        (m.partition(), m.key(), m.value(), m.headers(), m.timestamp()[1])
        for m in sorted(found, key=lambda m: -m.partition())[:2]
    ] == [(2, "ä".encode(), b"no JSON", [("h", b"x")], 5), (2, None, None, None, 1)]
    assert json.loads(send(shop, {"source": "orders", "value": CLICK}).stdout)["created"] == []
    assert len(consume(kafka, both["orders"], 3)) == 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"source": "order", "value": {}}, "`source` is `order`, which is no source"),
        ({"source": "orders"}, "`value` is missing"),
        ({"source": "orders", "value": {}, "partition": 1}, "`partition` is 1, and the topic "),
        ({"source": "orders", "value": "x" * 3_000_000}, "Message size too large"),
    ],
)
def test_a_record_that_cannot_be_sent_is_named_by_its_line(
    shop: Path, kafka: str, wrong: dict[str, Any], sentence: str
) -> None:
    assert send(shop, {"source": "tracking", "value": CLICK}).returncode == 0
    done = send(shop, {"source": "tracking", "value": CLICK}, wrong)
    [line] = done.stderr.splitlines()
    assert done.returncode in (1, 2)
    assert "records.jsonl, line 2" in line
    assert sentence in line
    if "size" not in sentence:
        assert len(consume(kafka, topic(shop, "tracking"), 1)) == 1, "nothing was sent"


def test_without_its_broker_or_for_topics_that_something_else_writes_nothing_is_sent(
    shop: Path,
) -> None:
    (shop / "broker").unlink()
    done = send(shop)
    assert done.returncode == 1
    assert (
        "the broker in broker does not run; start it with `watersmeet broker start" in done.stderr
    )
    file = shop / "watersmeet.yml"
    text = file.read_text()
    file.write_text(text.replace("repartition: null ", "repartition: {from: a, partitions: 1}", 1))
    done = send(shop)
    assert done.returncode == 2
    assert done.stderr.startswith("watersmeet: sources.tracking.repartition: ")
