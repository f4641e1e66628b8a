"""What the demo shows of the messages that it has published."""

from __future__ import annotations

import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group

from tests.audit.test_show import read
from watersmeet.core.sequence import SEQ
from watersmeet.dev import broker
from watersmeet.dev.demo import _sequence, _visit, run_demo
from watersmeet.errors import ConfigurationError


def message(seq: int) -> dict[str, Any]:
    return {
        "partition": 0,
        "kafka_timestamp": datetime.fromtimestamp(seq, timezone.utc),
        "key": b"k",
        "value": b"v",
        "headers": [{"key": SEQ, "value": b"%d" % seq}],
    }


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (3, ["0", "1", "2"]),
        (5, ["0", "1", "2", "3", "4"]),
        (6, ["0", "1", "2", "3", "...", "5"]),
        (1_238, ["0", "1", "2", "3", "...", "1237"]),
    ],
)
def test_messages_that_are_left_out_are_told(count: int, shown: list[str]) -> None:
    _, *lines = read(_sequence([message(seq) for seq in range(count)]))
    rows = [line.split()[1] for line in lines if line]
    assert rows == shown
    assert [line for line in lines if "more" in line] == (
        [f"0 ... {count - 5:,} more"] if "..." in shown else []
    )


@pytest.mark.parametrize(
    ("clicks", "order_at", "left_out"),
    [
        (3, 1, []),
        (8, 8, ["(and 1 before)"]),
        (20, 0, ["(and 13 after)"]),
        (20, 12, ["(and 6 before)", "(and 7 after)"]),
        (20, 20, ["(and 13 before)"]),
    ],
)
def test_the_order_of_a_visit_is_shown_wherever_it_is(
    clicks: int, order_at: int, left_out: list[str]
) -> None:
    def part(kind: str, second: float) -> dict[str, Any]:
        time = datetime.fromtimestamp(second, timezone.utc)
        return {"event_time": time, "value": {"type": kind, "aid": int(second)}}

    row = {
        "merge_key": "7",
        "event_time": 0,
        "last_event_time": clicks * 1_000,
        "tracking": [part("click", second) for second in range(clicks)],
        "orders": [part("order", order_at - 0.5)],
    }
    lines = read(Group(*_visit(row)))
    assert len([line for line in lines if " order " in line]) == 1
    assert [line for line in lines if line.startswith("(and")] == left_out
    assert len([line for line in lines if " click " in line]) == min(clicks, 7)


class EndedError(Exception):
    """Somebody has ended the demo."""


def begin(directory: Path) -> None:
    """A demo that ends while its broker starts."""
    with pytest.raises(EndedError):
        run_demo(directory, "embedded")


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(directory: Path) -> None:
        directory.mkdir()
        raise EndedError

    monkeypatch.setattr(broker, "start", start)


@pytest.mark.usefixtures("ending")
def test_one_that_was_ended_early_can_be_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "demo"
    begin(folder)
    assert (folder / "broker").is_dir()
    (folder / "broker" / "data").touch()
    begin(folder)
    assert [*(folder / "broker").iterdir()] == [], "it begins anew"

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_demo(folder, "embedded")
    begin(folder)


@pytest.mark.usefixtures("ending")
def test_the_folder_of_a_demo_of_before_is_taken_and_no_other(tmp_path: Path) -> None:
    before, other, file = (tmp_path / name for name in ("before", "other", "file"))
    for folder, text in ((before, b"# The demo's configuration: ..."), (other, b"\xff")):
        (folder / "broker").mkdir(parents=True)
        (folder / "watersmeet.yml").write_bytes(text)
    begin(before)
    with pytest.raises(ConfigurationError, match="not the work of an earlier demo"):
        run_demo(other, "embedded")
    (before / "watersmeet.yml").write_text("# my own")
    with pytest.raises(ConfigurationError, match="not the work of an earlier demo"):
        run_demo(before, "embedded")
    file.touch()
    with pytest.raises(ConfigurationError, match="file: cannot be written to"):
        run_demo(file, "embedded")
