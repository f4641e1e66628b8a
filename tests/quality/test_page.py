"""The page of a check: it says what is not met, needs nothing else, and holds what comes from
outside as text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.configurations import settings_for
from tests.support.quality import NOW_MS
from watersmeet.quality.check import Check, SuiteResult
from watersmeet.quality.evaluate import Outcome
from watersmeet.quality.page import page

EVIL = "<script>alert(1)</script>&\"'"


class Seen(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


def seen(folder: Path, *results: SuiteResult, last: Any = (), **more: Any) -> Seen:
    return Seen(page(Check(NOW_MS, 7, list(results), **more), settings_for(folder), last))


MET = Outcome("all is well", True, 0)
NOT_MET = Outcome(
    f"no {EVIL}", False, 12, examples=[{"partition": "0", "merge_key": EVIL, "status": "lost"}]
)


def test_what_is_not_met_is_told_with_its_rows(tmp_path: Path) -> None:
    found = seen(tmp_path, SuiteResult("mine", "silver", 7, 1_000, [MET, NOT_MET]))
    for part in (
        "1 of 2 expectations is not met.",
        f"no {EVIL}",
        "12 of 1,000 rows are against it.",
        EVIL,
        "lost",
        "Merge records",
    ):
        assert part in found.text, part
    assert "The first 1 of them." in found.text


def test_where_everything_is_met_the_page_says_so_first(tmp_path: Path) -> None:
    allowed = Outcome("nearly all is well", True, 3)
    found = seen(tmp_path, SuiteResult("mine", "bronze_tracking", 7, 1_000, [MET, allowed]))
    assert "The data is as expected" in found.text
    assert "but for 3 of 1,000 rows" in found.text
    assert "not met" not in found.text


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Outcome("a", False, observed="34"), "Found instead: 34."),
        (Outcome("a", False, trouble="no such column"), "It could not be checked: no such column."),
        (Outcome("a", False), "It is not met."),
        (Outcome("a", False, 1), "1 of 9 rows is against it."),
    ],
)
def test_what_was_found_instead_is_told(tmp_path: Path, outcome: Outcome, told: str) -> None:
    assert told in seen(tmp_path, SuiteResult("mine", "late", 7, 9, [outcome])).text


def test_where_nothing_is_new_the_last_results_are_shown(tmp_path: Path) -> None:
    last = [
        {"suite": EVIL, "table": "silver", "checked_at": NOW_MS, "expectations": 5, "failed": 2}
    ]
    found = seen(tmp_path, last=last, nothing_new=["silver"], skipped={"sink": "no broker"})
    assert "Nothing is new since the last check." in found.text
    assert EVIL in found.text
    assert "2 not met" in found.text
    assert "Published messages: no broker." in found.text


def test_the_page_asks_for_nothing_and_runs_nothing(tmp_path: Path) -> None:
    results = [
        SuiteResult("mine", table, 7, 10, [MET, NOT_MET])
        for table in ("bronze_orders", "silver", "late", "progress", "sink")
    ]
    found = seen(tmp_path, *results)
    tags = {tag for tag, _ in found.tags}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "form", "object"})
    for _, attributes in found.tags:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)
    [policy] = [
        attributes["content"]
        for tag, attributes in found.tags
        if tag == "meta" and "http-equiv" in attributes
    ]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
