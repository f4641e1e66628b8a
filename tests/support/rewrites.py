"""Lakes whose batches write all open records anew, in pieces, on the embedded engine, however few
they are."""

from __future__ import annotations

import sys
from typing import Final

import pytest
from deltalake import DeltaTable

from watersmeet import silver
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.lake import tables
from watersmeet.lake.location import Lake
from watersmeet.settings import Settings

BYTES: Final = 2_000
"""So much is a batch, and a piece is a quarter of it."""

PROGRAM: Final = (
    sys.executable,
    "-c",
    "from watersmeet import silver; from watersmeet.cli import main; "
    "from watersmeet.engine.embedded import EmbeddedEngine; "
    f"silver.HELD_BATCHES, EmbeddedEngine.merge_bytes = 0, {BYTES}; "
    f"EmbeddedEngine.few_bytes = {BYTES}; main()",
)
"""The command line, for a process that does so."""


def rewrite_open_records(patch: pytest.MonkeyPatch) -> None:
    """From now on this process does so."""
    patch.setattr(silver, "HELD_BATCHES", 0)
    patch.setattr(EmbeddedEngine, "merge_bytes", BYTES)
    patch.setattr(EmbeddedEngine, "few_bytes", BYTES)


def rewrites_of(settings: Settings) -> int:
    """How many batches have written the open records anew."""
    lake = Lake(settings)
    history = DeltaTable(lake.address(tables.SILVER), storage_options=dict(lake.storage)).history()
    return sum(
        commit.get("operationParameters", {}).get("mode") == "Overwrite" for commit in history
    )
