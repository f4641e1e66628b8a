"""Whether the data keeps its promises, derived again from the tables, Kafka and the sink. Reads only.

Progress is believed in one thing: how far silver is, per topic-partition, and its clock; and that is checked against bronze.
The checks are numbered as in the contract:

1. *bronze* has every offset once, and lacks none that Kafka has (`verify_bronze`);
2. every record that the merge has passed is in exactly one outcome (`verify_bronze`);
3. no key has two open rows, and no two rows share partition, key and event time (`verify_silver`);
4. what should have timed out has, nothing else has, and the clock is what bronze says (`verify_silver`);
5. silver and late are what the merge model makes of bronze, for a sample of keys or for all (`verify_model`);
6. the sink holds silver's finished records in order, and nothing else (`verify_sink`).

What a running lake writes meanwhile disturbs nothing: the sink's ends are taken before silver's version, and of bronze and late
only what that version has merged is judged.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from pipelines.adapters.kafka import Cluster, co_partitioned
from pipelines.adapters.lake import Lake
from pipelines.audit.validate import Problem
from pipelines.audit.verify_bronze import check_offsets, check_outcomes
from pipelines.audit.verify_evidence import SHOWN, Findings, read_evidence
from pipelines.audit.verify_model import check_model, check_validity
from pipelines.audit.verify_silver import check_clock, check_time_outs, check_unique
from pipelines.audit.verify_sink import check_sink, read_sink
from pipelines.errors import KafkaUnreachableError
from pipelines.settings import Settings


def verify(lake: Lake, settings: Settings, *, full: bool = False) -> dict[str, Any]:
    """The answer of `verify --json`; of each check at most `SHOWN` problems, and how many more there are.

    `full`: every key is compared with the merge model, not a sample. Raises KafkaUnreachableError, and ConfigurationError
    where a source's topic is gone.
    """
    try:
        counts = Cluster(settings.kafka).partition_counts()
        sink = read_sink(lake, settings, counts)
        evidence = read_evidence(lake, settings, co_partitioned(settings, counts), full=full)
        problems = [
            *_capped("bronze", check_offsets(evidence)),
            *_capped("outcomes", check_outcomes(evidence)),
            *_capped("uniqueness in silver", check_unique(evidence)),
            *_capped("clock and time-outs", check_clock(evidence), check_time_outs(evidence)),
            *_capped("silver against the merge model", check_model(evidence), check_validity(evidence)),
            *_capped("sink", check_sink(evidence, sink)),
        ]
    except KafkaException as error:
        reason = error.args[0]
        detail = reason.str() if isinstance(reason, KafkaError) else str(reason)
        raise KafkaUnreachableError(settings.kafka.bootstrap_servers, detail) from None
    return {"ok": not problems, "problems": [problem._asdict() for problem in problems]}


def _capped(check: str, *found: Findings) -> Iterable[Problem]:
    """The first problems of a check, and one that counts the others."""
    problems = list(chain.from_iterable(findings.problems for findings in found))
    more = sum(findings.more for findings in found) + max(0, len(problems) - SHOWN)
    yield from problems[:SHOWN]
    if more:
        yield Problem(f"{more:,} more problems like these", check, "mend those first, then verify again")
