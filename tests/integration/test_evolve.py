"""Rules that `evolve` takes, refuses, and lets go again: no lake ends for what it was told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lives import Life

pytestmark = [pytest.mark.long, pytest.mark.promise("C6"), pytest.mark.fault("rules")]


@pytest.mark.parametrize("rule", ["heartbeat", "where"])
def test_a_condition_that_means_another_thing_is_another_rule(
    kafka: str, tmp_path: Path, rule: str
) -> None:
    life = Life.make(kafka, tmp_path)
    life.configure(f"sources.orders.{rule}", {"field": "flag", "equals": 1})
    life.both(("k", 1000))
    life.run()
    life.configure(f"sources.orders.{rule}", {"field": "flag", "equals": True})
    said = life.call("run", "--once", exit_code=2)
    assert f"sources.orders.{rule}: the lake has other rules than this configuration" in said
    assert f"sources.orders.{rule}" in life.call("evolve")
    life.call("evolve", "--apply")
    life.run()
