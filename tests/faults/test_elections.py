"""Random elections of leaders that lack what was read or published: refused, or exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.elections import play
from tests.support import effort
from tests.support.truncated import truncated

pytestmark = [
    pytest.mark.long,
    pytest.mark.nightly,
    pytest.mark.promise("C52"),
    pytest.mark.fault("broker", oracle=True),
    pytest.mark.timeout(1200),
]


def test_what_a_broker_has_lost_is_told_or_costs_nothing(tmp_path: Path) -> None:
    with truncated(tmp_path / "broker") as own:
        broken = play(own, tmp_path, effort.seeds(3))
    assert not any(broken.values()), broken
