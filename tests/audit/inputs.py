"""What the tests of this room share: small cases, and configurations whose topics exist."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.cases import SOURCES, Case, random_case
from tests.support.configurations import settings_for
from tests.support.lakes import CaseLake
from tests.support.model_lakes import ModelLake
from tests.support.topics import create_topics
from watersmeet.audit.evidence import read_evidence
from watersmeet.audit.problems import Report
from watersmeet.audit.verify import check_tables
from watersmeet.core.idle import IdleDecision
from watersmeet.settings import Settings


def case_of(
    tracking: Sequence[bytes | None], orders: Sequence[bytes | None], *decided: IdleDecision
) -> Case:
    values = {"tracking": [*tracking], "orders": [*orders]}
    return Case(
        values,
        100,
        [source for source, mine in values.items() for _ in mine],
        {"orders": list(decided)},
    )


def richest_cases(count: int) -> list[Case]:
    """Of many random cases those with most late and finished records."""
    cases = [random_case(seed) for seed in range(200)]
    return sorted(cases, key=lambda case: -len(case.merged().late) - len(case.merged().timed_out))[
        :count
    ]


def settings_of(
    kafka: str, folder: Path, name: str, sink: str | None = None, **overrides: Any
) -> Settings:
    """A configuration whose sources are the topics `<name>_<source>` and whose sink is `name`, or
    another topic."""
    topics = {f"sources__{source}__topic": f"{name}_{source}" for source in SOURCES}
    return settings_for(folder, bootstrap=kafka, publish__topic=sink or name, **topics, **overrides)


def with_topics(
    kafka: str, folder: Path, name: str, partitions: int = 1, **overrides: Any
) -> Settings:
    """The same, once the topics are made."""
    create_topics(kafka, *[f"{name}_{source}" for source in SOURCES], name, partitions=partitions)
    return settings_of(kafka, folder, name, **overrides)


def problems_in(
    lake: ModelLake | CaseLake, *, full: bool = True, generation: int | None = None
) -> list[str]:
    """What is found without Kafka."""
    evidence = read_evidence(lake.reader, lake.settings, max(lake.cases) + 1, generation, full=full)
    report = Report()
    check_tables(evidence, report)
    return [
        f"{problem.where}: {problem.what}"
        for findings in report.values()
        for problem in findings.described()
    ]
