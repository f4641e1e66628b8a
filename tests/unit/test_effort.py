"""What the tests draw."""

from __future__ import annotations

import hypothesis

from tests.support.effort import SEED


def test_a_property_draws_the_same_cases_in_every_run_and_takes_its_time() -> None:
    usual = hypothesis.settings()
    assert (usual.deadline, usual.derandomize, usual.database) == (None, not SEED, None)
