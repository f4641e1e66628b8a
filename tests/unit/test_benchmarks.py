"""The benchmarks' input is what the documentation says, and the figures in it are of one run."""

from __future__ import annotations

import json

import pytest

from benchmarks.figures import PAGES, RECORDED, with_figures
from benchmarks.inputs import START_MS, TIMEOUT_MS, records
from benchmarks.programs import ROOT


@pytest.mark.parametrize("name", PAGES)
def test_the_figures_of_a_page_are_those_of_the_recorded_run(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    document = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert with_figures(text, PAGES[name](document)) == text


def test_figures_go_into_a_page_that_has_one_place_for_them() -> None:
    page = "a\n<!-- figures -->\n\nold\n\n<!-- /figures -->\nb"
    assert with_figures(page, "new") == "a\n<!-- figures -->\n\nnew\n\n<!-- /figures -->\nb"
    with pytest.raises(ValueError, match="once"):
        with_figures("a", "new")


def test_the_overlapping_input_has_45_000_open_sessions_out_of_order_and_nothing_late() -> None:
    begins: dict[int, int] = {}
    head, before, earlier = 0, 0, 0
    for event_time, session, _ in records(600_000, 60_000, "overlapping"):
        head = max(head, event_time)
        earlier += event_time < before
        before = event_time
        begin = begins[session] = min(begins.get(session, event_time), event_time)
        assert head - begin < TIMEOUT_MS
        if head > START_MS + TIMEOUT_MS + 100_000:
            break
    open_sessions = sum(begin >= head - TIMEOUT_MS for begin in begins.values())
    assert 42_000 < open_sessions < 48_000
    assert earlier > len(begins)


def test_the_ordered_input_is_in_order() -> None:
    times = [event_time for event_time, _, _ in records(5_000, 500, "ordered")]
    assert len(times) == 5_500
    assert times == sorted(times)
