"""What the answers look like to a person."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

_STATE_STYLES = {"active": "green", "held": "yellow", "idle": "cyan", "waiting": "red"}


def status_view(found: dict[str, Any]) -> Group:
    """A paragraph for every partition: its clock and its counts, then a line for each source."""
    return Group(*[part for partition in found["partitions"] for part in _partition(partition)])


def _partition(found: dict[str, Any]) -> tuple[RenderableType, ...]:
    counts = ("open", "timed_out", "late", "quarantined", "published")
    facts = " · ".join(f"{name.replace('_', ' ')} [bold]{found[name]:,}[/]" for name in counts)
    sources = Table("", "state", "head", "lead", "lag", box=None, header_style="dim")
    for name, at in found["sources"].items():
        state = f"[{_STATE_STYLES[at['state']]}]{at['state']}[/]"
        sources.add_row(name, state, utc(at["head"]), duration(at["lead"]), f"{at['lag']:,}")
    return f"[bold]partition {found['partition']}[/]  clock {utc(found['clock'])}", f"  {facts}", sources, ""


def utc(ms: int | None) -> str:
    """Epoch ms as a time of day in UTC, to the millisecond; a dash where there is none."""
    if ms is None:
        return "-"
    return datetime.fromtimestamp(ms / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def duration(ms: int | None) -> str:
    """Milliseconds in the two largest units that they fill."""
    if ms is None:
        return "-"
    units = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)]
    parts = []
    for name, size in units:
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count}{name}")
    return " ".join(parts[:2]) or "0"
