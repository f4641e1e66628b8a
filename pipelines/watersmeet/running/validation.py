"""Judges the rows that a merge has changed by the user's expressions."""

from __future__ import annotations

from watersmeet.engine import Engine, Rows
from watersmeet.settings import PublishSettings


def validated(engine: Engine, changed: Rows, publish: PublishSettings) -> Rows:
    """Return the changed rows; those that have timed out are judged, if there are expressions."""
    if publish.valid == "true" and publish.value is None:
        return changed
    return engine.validated(changed, publish.valid, publish.value, publish.max_bytes)
