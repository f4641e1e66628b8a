"""How far a command is: the backlog that it works through, and what it waits for meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

EVERY_S: Final = 10.0
"""Maximum time for which a command that works says nothing."""


@dataclass
class _Backlog:
    began_s: float
    total: int
    remaining: int


@dataclass
class Progress:
    """The progress of a command, as its parts tell it.

    `waits_for`: what is under way, in a few words; empty where there is nothing to do.
    """

    now_s: Callable[[], float] = time.monotonic
    waits_for: str = ""
    _waits_since_s: float = 0.0
    _backlogs: dict[str, _Backlog] = field(default_factory=dict)
    _said_s: dict[str, float] = field(default_factory=dict)

    def begin(self, what: str) -> None:
        """Set what is waited for from now on; nothing, where that is empty."""
        self.waits_for = what
        self._waits_since_s = self._said_s["news"] = self.now_s()

    def left(self, part: str, remaining: int) -> None:
        """Set how many records a part of the work has still to do; more than before have come."""
        if not self.facts():
            self._backlogs.clear()  # what is done is no part of the next backlog
        known = self._backlogs.get(part)
        if known is None:
            self._backlogs[part] = _Backlog(self.now_s(), remaining, remaining)
            return
        known.total += max(0, remaining - known.remaining)
        known.remaining = remaining

    def facts(self) -> dict[str, int]:
        """Return `done` records, `of` how many, and once some are done `rate` (1/s) and `left_s`.

        Empty without a backlog.
        """
        backlogs = self._backlogs.values()
        if not any(backlog.remaining for backlog in backlogs):
            return {}
        total = sum(backlog.total for backlog in backlogs)
        remaining = sum(backlog.remaining for backlog in backlogs)
        facts = {"done": total - remaining, "of": total}
        elapsed_s = self.now_s() - min(backlog.began_s for backlog in backlogs)
        if facts["done"] and elapsed_s > 0:
            rate = facts["done"] / elapsed_s
            facts |= {"rate": round(rate), "left_s": round(remaining / rate)}
        return facts

    def line(self) -> str:
        """Return the progress in words; empty where there is nothing to do."""
        facts = self.facts()
        words = [f"{facts['done']:,} of {facts['of']:,} records"] if facts else []
        if "rate" in facts:
            words += [f"{facts['rate']:,}/s", f"{_clock(facts['left_s'])} left"]
        if self.waits_for and not facts:
            since_s = int(self.now_s() - self._waits_since_s)
            words.append(f"{self.waits_for} ({_clock(since_s)})")
        return ", ".join(words)

    def spoke(self) -> None:
        """Record that something else was said."""
        self._said_s["news"] = self.now_s()

    def is_due(self) -> bool:
        """Return True where `line` is to be said again: every `EVERY_S`, or after that silence."""
        has_backlog = bool(self.facts())
        if not has_backlog and not self.waits_for:
            self._said_s.pop("backlog", None)
            return False
        now_s = self.now_s()
        kind = "backlog" if has_backlog else "news"
        if now_s - self._said_s.setdefault(kind, now_s) < EVERY_S:
            return False
        self._said_s[kind] = self._said_s["news"] = now_s
        return True


def _clock(seconds: int) -> str:
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60} m"
    return f"{seconds // 60} m {seconds % 60} s" if seconds >= 60 else f"{seconds} s"
