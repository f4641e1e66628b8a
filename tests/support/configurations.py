"""Configurations, as YAML gives them."""

from __future__ import annotations

from typing import Any

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
