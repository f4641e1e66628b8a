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
    stuck = "".join(f"  [red]waits for {name}\\[{found['partition']}][/]" for name in waited_for(found))
    return f"[bold]partition {found['partition']}[/]  clock {utc(found['clock'])}{stuck}", f"  {facts}", sources, ""


def waited_for(found: dict[str, Any]) -> list[str]:
    """The sources whose next record a partition's clock waits for, where another has records that wait for it."""
    sources = found["sources"]
    if not any(at["state"] == "held" for at in sources.values()):
        return []
    return [name for name, at in sources.items() if at["head"] == found["clock"]]


def preview_view(rows: list[dict[str, Any]]) -> Table:
    """What a run would read: a line for each topic-partition."""
    table = Table("source", "partition", "from", "until", "offsets", "because of", box=None, header_style="dim")
    for row in rows:
        offsets = row["until_offset"] - row["from_offset"]
        numbers = (row["partition"], row["from_offset"], row["until_offset"], f"{offsets:,}")
        table.add_row(row["source"], *map(str, numbers), row["because"])
    return table


def reset_view(found: dict[str, Any]) -> Group:
    """What a jump does, or has done."""
    does = "jumped" if found["done"] else "would jump"
    table = Table("source", "partition", "from", "to", "skipped", "read again", box=None, header_style="dim")
    for jump in found["jumps"]:
        numbers = [jump[name] for name in ("partition", "from_offset", "to_offset", "skipped", "read_again")]
        table.add_row(jump["source"], *[f"{number:,}" for number in numbers])
    closes = f"{found['open_records_closed']:,} open records {'were' if found['done'] else 'would be'} closed unpublished"
    hint = "" if found["done"] else "\nNothing was changed. Do it with --yes."
    return Group(f"{does} to {found['to']}; {closes}", table, hint)


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
