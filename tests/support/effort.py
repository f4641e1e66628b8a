"""How much a run of the tests draws: the same cases for every change, and each night many that
nobody has seen.

`make test` and `make test-long` draw the same cases in every run, so that a failure is of the
change. `make test-all` sets `SEED_VARIABLE`: each run then draws other cases, `AT_NIGHT` times as
many, and says its seed, by which it is repeated.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

import hypothesis
import pytest

SEED_VARIABLE: Final = "WATERSMEET_TEST_SEED"
AT_NIGHT: Final = 8

SEED: Final = int(os.environ.get(SEED_VARIABLE, "0"))
"""0: the cases of every change."""


def draws(examples: int) -> hypothesis.settings:
    """Return the settings of a property that draws so many examples for every change."""
    return hypothesis.settings(
        max_examples=count(examples), deadline=None, derandomize=not SEED, database=None
    )


def count(cases: int) -> int:
    """Return how many cases this run tries, of which a run for every change tries `cases`."""
    return cases * (AT_NIGHT if SEED else 1)


PROFILE: Final = "watersmeet"
"""What holds for properties that say nothing of their settings: those of `draws`, as for all."""

hypothesis.settings.register_profile(PROFILE, draws(100))
hypothesis.settings.load_profile(PROFILE)


def seeds(cases: int) -> range:
    """Return the seeds of the random cases that this run tries, of which a run for every change
    tries `cases`."""
    return range(SEED * 1_000_000, SEED * 1_000_000 + count(cases))


def described() -> str:
    """Say which cases are drawn, and how they are drawn again."""
    return (
        f"cases drawn with SEED={SEED}, {AT_NIGHT} times as many"
        if SEED
        else "the cases of every change"
    )


def first_then_nightly(values: Iterable[Any], for_every_submission: int = 1) -> list[Any]:
    """Return parameters of which the first ones are tried for every submission, and all of them
    each night. A tuple has the values of several parameters."""
    return [
        pytest.param(
            *_as_arguments(value),
            marks=[] if number < for_every_submission else [pytest.mark.nightly],
        )
        for number, value in enumerate(values)
    ]


def _as_arguments(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)
