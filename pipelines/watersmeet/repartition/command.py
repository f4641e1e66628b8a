"""The command `repartition`: all sources whose topics are repartitioned, in turns."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from watersmeet.engine.polling import RunningThread
from watersmeet.errors import ConfigurationError
from watersmeet.kafka.groups import Groups
from watersmeet.kafka.options import check_options
from watersmeet.kafka.registry import Registry
from watersmeet.monitoring.events import Observer, all_of
from watersmeet.monitoring.observability import Reporter
from watersmeet.repartition.stage import Repartition
from watersmeet.running.runner import Runner
from watersmeet.settings import Settings

EVERY_S: Final = 0.2
"""Interval at which Kafka is checked for new records."""


def repartition(
    settings: Settings,
    reporter: Reporter,
    stopping: threading.Event,
    observers: Sequence[Observer] = (),
    *,
    once: bool,
    patience_s: float = 120.0,
) -> list[dict[str, Any]]:
    """Repartition every configured source: what there is now (`once`), or until `stopping` is set.

    Return a row for each source and topic that is read: `records` that were written, and by
    partition the offsets that were `read` and the `ends` of the source's own topic. Trouble with
    Kafka is waited out. Raises WatersmeetError.
    """
    longest_ms = _check(settings)
    notify = all_of(observers)
    runner = Runner(reporter, stopping, patience_s + longest_ms / 1000, notify=notify)
    groups = Groups(settings)
    with ThreadPoolExecutor(1) as executor, ExitStack() as stack:
        show = partial(groups.note, "repartition")
        stages = [
            Repartition(settings, name, executor, reporter, notify, show)
            for name in settings.repartitioned
        ]
        stack.callback(RunningThread(type(groups).__name__, groups.follow).stop)
        for stage in stages:
            runner.retry(stage.poll)
        while not stopping.is_set():
            for stage in stages:
                runner.retry(stage.advance)
            is_idle = all(stage.is_done for stage in stages)
            if is_idle and (once or stopping.wait(EVERY_S)):
                break
            for stage in stages:
                if not once and stage.is_done:
                    runner.retry(stage.poll)
        return [described for stage in stages for described in stage.described()]


def _check(settings: Settings) -> int:
    # Returns the longest time (ms) that a source waits for a schema that its registry lacks.
    if problems := check_options(settings.kafka):
        raise ConfigurationError(*problems[0])
    for name, registry in settings.registries.items():
        if name in settings.repartitioned:
            Registry(registry).check_options()
    if not settings.repartitioned:
        raise ConfigurationError(
            "none of them is repartitioned",
            where="sources",
            fix="add `repartition: {from: ..., partitions: ...}` to one",
        )
    return max(settings.sources[name].unknown_after_ms or 0 for name in settings.repartitioned)
