"""What the demo shows of the messages that it has published."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from tests.audit.test_show import read
from watersmeet.core.sequence import SEQ
from watersmeet.dev.demo import _sequence


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
