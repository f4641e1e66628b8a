"""What each partition merged under which timeout, as far as it has ended: of a lost lake, as the sink told it, and of this one.

A lost lake's stretches are rows of `recovered`. Until they have been merged again, each to its end, their timeouts hold in their
partition, whatever this lake's epochs say. A deliberate reset begins with fresh state, and without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipelines.core.plan import Stretch
from pipelines.core.recovery import Told, parse_told
from pipelines.core.window import Window
from pipelines.lake import tables
from pipelines.lake.epochs import Epochs, epoch_ends
from pipelines.lake.floors import last_reset
from pipelines.lake.questions import Questions, Where


def read_lived(questions: Questions) -> dict[int, Told]:
    """By partition, what the lost lake did that this one takes up (`SinkState.lived`), with the open end of its last stretch
    where this lake has come to it; nothing after a reset.
    """
    is_told = questions.exists(tables.RECOVERED) and "epochs" in questions.columns(tables.RECOVERED).names
    if not is_told:
        return {}
    rows = questions.select(tables.RECOVERED, ["partition", "epochs"], [[("epochs", "is not null", None)]]).to_pylist()
    if not rows or _is_reset(questions):
        return {}
    lived = {row["partition"]: parse_told(row["epochs"].encode()) for row in rows}
    ends = _ends(questions, {p: told.stretches[-1] for p, told in lived.items() if told.stretches[-1].offsets is None})
    return {p: told._replace(stretches=(*told.stretches[:-1], ends.get(p, told.stretches[-1]))) for p, told in lived.items()}


def windows_of(epochs: Epochs, lived: Mapping[int, Told]) -> set[Window]:
    """All windows that a lake has had, or as far as it knows them the lost one that it goes on with."""
    of_lost = [(told.first, told.window, *(stretch.window for stretch in told.stretches)) for told in lived.values()]
    return {epoch.settings.merge.window for epoch in epochs}.union(*of_lost)


def lags_of(epochs: Epochs) -> set[int]:
    """How far (ms) tenants' clocks have been allowed to be behind: 0 without tenants."""
    return {epoch.settings.merge.tenant_max_lag_ms or 0 for epoch in epochs}


def longest(epochs: Epochs, lived: Mapping[int, Told]) -> int:
    """For how long (ms) after its first record a merge record could be open at most, by the clock of all, under any of the rules:
    the longest of these windows, and the largest lag of a tenant's clock.
    """
    windows = [window.longest_ms for window in windows_of(epochs, lived)]
    return max([*windows, *(told.longest_ms or 0 for told in lived.values())]) + max(lags_of(epochs))


def read_since(questions: Questions) -> dict[int, int]:
    """With tenants, by partition, from which position of their tenant (ms) on the records of a lost lake were taken up; nothing
    after a reset.
    """
    if not questions.exists(tables.RECOVERED) or "since" not in questions.columns(tables.RECOVERED).names or _is_reset(questions):
        return {}
    found = questions.select(tables.RECOVERED, ["partition", "since"], [[("since", "is not null", None)]])
    return dict(zip(found["partition"].to_pylist(), found["since"].to_pylist(), strict=True))


def stretches_of(
    questions: Questions, epochs: Epochs, lived: Mapping[int, Told], partitions: Iterable[int]
) -> dict[int, list[Stretch]]:
    """By partition all stretches in their order: the lost lake's, also those that are still to come, and this lake's own since
    the last reset.
    """
    own = epoch_ends(questions, epochs, last_reset(questions), lived)
    return {p: [*(lived[p].stretches if p in lived else ()), *own.get(p, ())] for p in partitions}


def _is_reset(questions: Questions) -> bool:
    return questions.exists(tables.PROGRESS) and last_reset(questions) >= 0


def just_taken_up(questions: Questions, lived: Mapping[int, Told], last_batch: int) -> list[int]:
    """The partitions whose last stretch of a lost lake has ended with this batch, the last one: by this lake's own window nothing
    was merged or closed there yet.
    """
    ends = {p: told.stretches[-1].clock for p, told in lived.items() if told.stretches[-1].offsets is not None}
    return [p for p, batch in _first_batches(questions, ends).items() if batch == last_batch]


def _ends(questions: Questions, last: Mapping[int, Stretch]) -> dict[int, Stretch]:
    """Where open ends came to be, in the first batch whose clock had reached them; absent where there was none yet."""
    found: dict[int, Stretch] = {}
    for p, batch in _first_batches(questions, {p: stretch.clock for p, stretch in last.items()}).items():
        where: Where = [[("partition", "=", p), ("batch", "=", batch)]]
        rows = questions.select(tables.PROGRESS, ["source", "until_offset", "clock"], where).to_pylist()
        until = {row["source"]: row["until_offset"] for row in rows}
        found[p] = Stretch(last[p].window, rows[0]["clock"], until)
    return found


def _first_batches(questions: Questions, clocks: Mapping[int, int]) -> dict[int, int]:
    """By partition, the first batch whose clock has reached this one (ms); absent where there was none yet."""
    if not clocks or not questions.exists(tables.PROGRESS):
        return {}
    reached: Where = [[("partition", "=", p), ("clock", ">=", clock)] for p, clock in clocks.items()]
    firsts = questions.summary(tables.PROGRESS, ["partition"], {"batch": ("min", "batch")}, reached).to_pylist()
    return {first["partition"]: first["batch"] for first in firsts}
