"""What `verify` decides in plain Python: what the model expects of a key, what differs, and how the command answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pipelines import cli
from pipelines.audit import verify as verify_module
from pipelines.audit.validate import Problem
from pipelines.audit.verify import _capped
from pipelines.audit.verify_bronze import subtract
from pipelines.audit.verify_evidence import SHOWN, Findings, Stretch
from pipelines.audit.verify_model import Late, Merged, Part, differences, expected
from pipelines.core.model import MergeRules
from pipelines.core.plan import TopicPartition
from tests.support.configurations import SMALLEST

RULES = MergeRules(("tracking", "orders"), 100)


def record(source: str, offset: int, event_time: int, position: int | None = None, stretch: int = 0) -> dict[str, Any]:
    at = event_time if position is None else position
    row = {"source": source, "offset": offset, "event_time": event_time, "position": at, "value": offset, "raw": -offset}
    return {"kind": 0, "stretch": stretch, **row}


def silver(row: Merged) -> dict[str, Any]:
    return {"kind": 1, **row._asdict(), "parts": [part._asdict() for part in row.parts]}


def late(row: Late) -> dict[str, Any]:
    named = row._asdict()
    return {"kind": 2, **named, "raw": named.pop("value")}


def stretch(clock: int | None, begin: tuple[int, int] = (0, 0), until: tuple[int, int] = (3, 1)) -> Stretch:
    tps = [TopicPartition(source, 0) for source in RULES.sources]
    clocks = {} if clock is None else {0: clock}
    return Stretch(dict(zip(tps, begin, strict=True)), dict(zip(tps, until, strict=True)), clocks, {}, None)


def part(source: str, offset: int, event_time: int) -> Part:
    return Part(source, offset, event_time, offset)


RECORDS = [record("tracking", 0, 10), record("orders", 0, 50), record("tracking", 1, 200), record("tracking", 2, 90, 200)]
TIMED_OUT = Merged("timed_out", False, 10, 50, (part("tracking", 0, 10), part("orders", 0, 50)))
OPEN = Merged("open", False, 200, 200, (part("tracking", 1, 200),))
LATE = Late("tracking", 2, 90, 200, -2)


def test_a_keys_rows_are_those_of_the_model() -> None:
    assert expected(RULES, [stretch(200)], 0, "k", RECORDS, []) == ([TIMED_OUT, OPEN], [LATE])
    assert expected(RULES, [stretch(None)], 0, "k", RECORDS, []) == ([], [])


def test_what_was_published_before_a_recovery_is_not_merged_but_late_is_late() -> None:
    assert expected(RULES, [stretch(200)], 0, "k", RECORDS, [(0, 10)]) == ([OPEN], [LATE])
    assert expected(RULES, [stretch(200)], 0, "k", RECORDS, [(0, 10), (0, 150)]) == ([], [LATE])


def test_a_reset_closes_what_is_open() -> None:
    stretches = [stretch(200), stretch(None, begin=(5, 5))]
    closed = OPEN._replace(status="timed_out", is_reset=True)
    assert expected(RULES, stretches, 0, "k", RECORDS, []) == ([TIMED_OUT, closed], [LATE])


def test_what_is_merged_again_after_a_jump_back_leaves_its_merge_record() -> None:
    stretches = [stretch(200), stretch(200, begin=(1, 1))]
    again = [record("tracking", 1, 200, stretch=1), record("tracking", 2, 90, 200, stretch=1)]
    assert expected(RULES, stretches, 0, "k", [*RECORDS, *again], []) == ([TIMED_OUT, OPEN], [LATE])
    further_back = [stretch(200), stretch(60, begin=(1, 0))]
    again = [record("orders", 0, 50, stretch=1)]
    left = Merged("timed_out", True, 10, 10, (part("tracking", 0, 10),))
    alone = Merged("open", False, 50, 50, (part("orders", 0, 50),))
    assert expected(RULES, further_back, 0, "k", [*RECORDS, *again], []) == ([left, alone], [])
    assert expected(RULES, further_back, 0, "k", [*RECORDS, *again], [(1, 10)]) == ([left], []), "published before the jump"


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([TIMED_OUT, OPEN, LATE], []),
        ([OPEN, LATE], [(10, "the row is missing (tracking@0, orders@0)")]),
        ([TIMED_OUT, OPEN, OPEN, LATE], [(200, "the model has no such row (tracking@1)")]),
        ([TIMED_OUT, OPEN._replace(status="timed_out"), LATE], [(200, "status is timed_out, the model's open")]),
        ([TIMED_OUT, OPEN._replace(event_time=199), LATE], [(199, "event_time is 199, the model's 200")]),
        ([TIMED_OUT._replace(parts=TIMED_OUT.parts[:1]), OPEN, LATE], [(10, "lacks orders@0")]),
        ([TIMED_OUT, OPEN._replace(parts=(*OPEN.parts, part("orders", 7, 201))), LATE], [(200, "has orders@7")]),
        ([TIMED_OUT._replace(parts=TIMED_OUT.parts[::-1]), OPEN, LATE], [(10, "its parts are in another order")]),
        ([TIMED_OUT, OPEN._replace(parts=(Part("tracking", 1, 200, 77),)), LATE], [(200, "value of tracking@1 is another")]),
        ([TIMED_OUT, OPEN], [("tracking", 2, "the late record is missing (position 200)")]),
        ([TIMED_OUT, OPEN, LATE, LATE], [("tracking", 2, "the model does not have it late, or not so often")]),
        ([TIMED_OUT, OPEN, LATE._replace(position=201)], [("tracking", 2, "position is not as in bronze")]),
    ],
)
def test_every_difference_is_told_once_with_its_place(found: Sequence[Merged | Late], told: Sequence[tuple[object, ...]]) -> None:
    rows = [*RECORDS, *[silver(row) if isinstance(row, Merged) else late(row) for row in found]]
    different = list(differences(RULES, [stretch(200)], 0, "k", rows))
    places = [(d.event_time,) if d.source is None else (d.source, d.offset) for d in different]
    assert places == [tuple(each[:-1]) for each in told]
    assert all(str(each[-1]) in d.what for d, each in zip(different, told, strict=True))


def test_a_record_twice_in_bronze_counts_once() -> None:
    rows = [*RECORDS, *RECORDS, silver(TIMED_OUT), silver(OPEN), late(LATE)]
    assert list(differences(RULES, [stretch(200)], 0, "k", rows)) == []


def test_a_range_without_its_holes() -> None:
    assert subtract((0, 10), []) == [(0, 10)]
    assert subtract((0, 10), [(0, 3), (5, 6), (9, 20)]) == [(3, 5), (6, 9)]
    assert subtract((0, 10), [(0, 10)]) == subtract((0, 10), [(0, 4), (2, 10)]) == []
    assert subtract((0, 10), [(7, 4)]) == [(0, 10)], "a jump back passes nothing over"


def test_at_most_so_many_problems_are_shown_and_the_others_counted() -> None:
    problem = Problem("what", "where", "fix")
    assert list(_capped("check", Findings([]), Findings([problem] * SHOWN))) == [problem] * SHOWN
    shown = list(_capped("check", Findings([problem] * SHOWN, 3), Findings([problem] * 4, 1000)))
    assert shown[:SHOWN] == [problem] * SHOWN
    [rest] = shown[SHOWN:]
    assert (rest.what, rest.where) == ("1,007 more problems like these", "check")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("problems", [[], [Problem("a row is missing", "silver: partition 0", "rebuild")._asdict()]])
def test_a_broken_promise_is_exit_status_3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problems: list[dict[str, str]], full: bool
) -> None:
    found = {"ok": not problems, "problems": problems}
    asked: list[bool] = []

    def answer(*_: object, full: bool) -> dict[str, object]:
        asked.append(full)
        return found

    monkeypatch.setattr(verify_module, "verify", answer)
    monkeypatch.setattr(cli, "_lake", lambda *_: None)
    path = tmp_path / "watersmeet.yml"
    path.write_text(yaml.safe_dump(SMALLEST))
    options = ["verify", "-c", str(path), *(["--full"] if full else [])]
    machine, person = (CliRunner().invoke(cli.app, [*options, *more]) for more in (["--json"], []))
    assert [machine.exit_code, person.exit_code] == [3 if problems else 0] * 2
    assert json.loads(machine.stdout) == found
    assert ("a row is missing" if problems else "every promise is kept") in person.stdout
    assert asked == [full, full]
