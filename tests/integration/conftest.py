"""What several of these tests break: a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.registry import TestRegistry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[TestRegistry]:
    """A registry that a test may break."""
    (folder := tmp_path / "registry").mkdir()
    found = TestRegistry(folder)
    found.start()
    yield found
    found.kill()
