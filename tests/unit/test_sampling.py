"""What a run looks up for its observers from time to time."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import Case, keyed, random_case
from tests.support.configurations import settings_for
from tests.support.model_lakes import ModelLake
from tests.support.panics import PanicException
from watersmeet.lake import tables
from watersmeet.monitoring.events import BronzeProgress, Committed, Event, Sampled
from watersmeet.running.sampling import FIELDS_EVERY, Sampler


class AwayOnce:
    """A reader of tables whose store is away once."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._is_away = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def summary(self, *arguments: Any) -> Any:
        if self._is_away:
            self._is_away = False
            raise OSError("the store is away")
        return self._reader.summary(*arguments)


def test_a_question_that_failed_is_asked_again_with_the_next_sample(tmp_path: Path) -> None:
    case, sampled = random_case(3), list[Event]()
    lake = ModelLake(settings_for(tmp_path), {0: case})
    lake.arrive(0.5)
    lake.merge()
    reader: Any = AwayOnce(lake.reader)
    sampler = Sampler(lake.settings, 1, ["gold"], reader, sampled.append)
    sampler(Committed(tables.SILVER))
    with pytest.raises(OSError, match="the store is away"):
        sampler.sample()
    sampler.sample()
    sampler.sample()  # nothing has changed since
    first, second = sampled
    assert isinstance(first, Sampled)
    assert isinstance(second, Sampled)
    assert first.open_rows is not None
    assert first.open_rows > 0
    assert second.open_rows is None


def test_fields_are_looked_at_where_bronze_has_read_more_and_once_a_minute(
    tmp_path: Path,
) -> None:
    schema = {"type": "object", "properties": {"ts": {"type": "integer"}, "k": {"type": "string"}}}
    (tmp_path / "orders.json").write_text(json.dumps(schema))
    orders: list[bytes | None] = [keyed("k", n, **{"x": 1} if n % 4 == 0 else {}) for n in range(8)]
    case = Case({"tracking": [], "orders": orders}, 100, ["orders"] * 8)
    lake = ModelLake(settings_for(tmp_path, sources__orders__schema="orders.json"), {0: case})
    lake.arrive()
    sampled = list[Any]()
    sampler = Sampler(lake.settings, 1, ["gold"], lake.reader, sampled.append)
    sampler.sample()
    read = BronzeProgress({tp: end for tp, end in lake.arrived.items() if end})
    sampler(read)
    for _ in range(FIELDS_EVERY):
        sampler.sample()
        sampler(read)
    sampler.sample()
    shares = [sample.dropped for sample in sampled]
    assert shares == [None, {"orders": 0.25}, *[None] * (FIELDS_EVERY - 1), {"orders": 0.25}]


@pytest.mark.parametrize("failure", [OSError("the store is away"), PanicException("no thread")])
def test_a_sample_that_fails_ends_no_sampling(tmp_path: Path, failure: BaseException) -> None:
    class Failing(Sampler):
        def sample(self) -> None:
            raise failure

    reader: Any = None  # nothing is asked of it
    stopping = threading.Event()
    stopping.set()
    Failing(settings_for(tmp_path), 1, ["gold"], reader, lambda _: None).follow(stopping)
