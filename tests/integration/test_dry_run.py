"""`try` beside real runs: the same messages byte for byte, and the user's SQL expressions."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.support.cases import keyed
from tests.support.configurations import settings_for
from tests.support.rivers import Losses, River
from tests.support.topics import published
from tests.unit.test_dry_run import records_of, sent
from watersmeet.core.message import message_bytes
from watersmeet.dry_run import try_records
from watersmeet.errors import ConfigurationError

pytestmark = pytest.mark.promise("C12")


def test_it_shows_the_messages_that_a_run_sends(kafka: str, tmp_path: Path) -> None:
    river = River.make(
        kafka, tmp_path, "tried", sources__orders__event_time={"field": "ts", "unit": "ms"}
    )
    for _ in range(4):
        river.flow()
    river.finish()
    assert river.losses() == Losses()
    found = try_records(river.file, records_of(river.cases), close=False)
    messages = sorted(published(kafka, river.sink, river.partitions))
    assert len(messages) > 20
    assert sorted(sent(found)) == messages


@pytest.mark.long
def test_the_users_expressions_judge_and_word_the_messages(tmp_path: Path) -> None:
    value = "CASE WHEN size(tracking) > 0 THEN concat(merge_key, ' ', size(orders)) END"
    max_bytes = message_bytes(3, 1, 0)
    settings = settings_for(
        tmp_path,
        publish__valid="orders[1].offset >= 0",
        publish__value=value,
        publish__max_bytes=max_bytes,
    )
    records = [
        *[{"source": "tracking", "value": keyed(key, 5)} for key in ("a", "b", "long")],
        *[{"source": "orders", "value": keyed(key, 7)} for key in ("a", "c", "long")],
    ]
    found = try_records(settings, records)
    validated = [(row["key"], row["valid"], row["invalid_reason"]) for row in found["records"]]
    assert validated == [
        ("a", True, None),
        ("b", False, "predicate"),
        ("long", False, "too_large"),
        ("c", True, None),
    ]
    assert [(message["key"], message["value"]) for message in found["messages"]] == [
        ("a", "a 1"),
        ("c", None),
    ]
    wrong = settings.model_copy(
        update={"publish": settings.publish.model_copy(update={"valid": "sizes(orders)"})}
    )
    with pytest.raises(
        ConfigurationError,
        match=r"publish.valid: `sizes\(orders\)` has `sizes`, which is no function of DuckDB's",
    ):
        try_records(wrong, [{"source": "orders", "value": orjson.dumps({"k": "a", "ts": 1})}])
