"""The tests catch what they are there for: a fault that is planted in each layer fails its test
(docs/testing.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.planted import PLANTED, ROOT, Planted, caught


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.fault)
def test_every_fault_still_has_its_place(planted: Planted) -> None:
    assert (ROOT / planted.file).read_text(encoding="utf-8").count(planted.right) == 1


def test_the_documentation_lists_every_fault_with_its_test() -> None:
    text = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    assert [
        planted.fault
        for planted in PLANTED
        if f"| {planted.fault} | `{planted.caught_by}` |" not in text
    ] == []


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.fault)
def test_a_planted_fault_is_caught_by_its_test(planted: Planted, tmp_path: Path) -> None:
    assert caught(planted, tmp_path)
