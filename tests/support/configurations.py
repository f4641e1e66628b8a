"""Configurations, as YAML gives them, and as settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.cases import SOURCES
from watersmeet.settings import Settings

SMALLEST: dict[str, Any] = {
    "name": "shop",
    "lake": "./lake",
    "kafka": {"bootstrap_servers": "127.0.0.1:9092"},
    "sources": {
        "tracking": {"topic": "tracking", "event_time": "ts"},
        "orders": {"topic": "orders", "event_time": "ts"},
    },
    "merge": {"timeout": "30m"},
    "publish": {"topic": "merged"},
}
"""Every required field and nothing else."""


IDS: dict[str, Any] = {f"sources__{name}__id": "i" for name in SOURCES}
"""Overrides of `settings_for`: records have ids (`tests.support.cases.with_ids`)."""


def settings_for(
    folder: Path,
    *,
    bootstrap: str = "127.0.0.1:1",
    sources: Sequence[str] = SOURCES,
    **overrides: Any,
) -> Settings:
    """A configuration whose records look like those of `cases`: key `k`, event time `ts`; overrides
    by dotted name with `__`.

    Its engine is the embedded one, which takes a tenth of Spark's time, unless a test is about
    Spark. It does not wait for the disk, which may take most of a test's time.
    """
    values: dict[str, Any] = {
        "name": "test",
        "engine": "embedded",
        "lake": str(folder / "lake"),
        "durable": False,
        "kafka": {"bootstrap_servers": bootstrap},
        "sources": {
            name: {
                "topic": name,
                "key": "k",
                "event_time": "ts",
                "heartbeat": {"field": "type", "equals": "heartbeat"},
            }
            for name in sources
        },
        "merge": {"timeout": "100ms"},
        "publish": {"topic": "merged"},
    }
    for path, value in overrides.items():
        *outer, last = path.split("__")
        target = values
        for name in outer:
            target = target[name]
        target[last] = value
    return Settings.model_validate(values, context={"folder": folder})
