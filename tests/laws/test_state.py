"""The state of the merge that is replayed from the tables is the one that was carried along."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.laws.conftest import QUICK, MakeLake
from tests.laws.test_idle import Clock, Quiet
from tests.laws.test_tenants import with_rules
from tests.support.cases import rich_cases
from tests.support.effort import first_then_nightly, seeds
from tests.support.lakes import CaseLake
from tests.support.tenants import Window, merge_of, tenant_case
from watersmeet.core.state import State
from watersmeet.lake.history import read_history
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.state import state_at

pytestmark = [
    pytest.mark.promise("T3"),
    pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module"),
    pytest.mark.fault("cuts", "rules"),
]

WINDOWS: dict[str, list[Window]] = {
    "tenants": [
        *((100, None, 300), (30, 90, 1000), (150, 400, 50), (80, None, 500), (1, 2, 0)),
        *((100, 150, 100), (30, 90, 100), (30, 90, 30), (80, None, 300)),
    ],
    "timeouts": [(gap, None, None) for gap in (100, 300, 30, 1, 99, 40)],
}


def told(state: State) -> dict[str, Any]:
    """A state as values that can be compared."""
    heads = sorted(state.heads.to_pylist(), key=lambda row: [*map(str, row.values())])
    cuts = {tp: cut for tp, cut in state.cuts.items() if tp.partition in state.clocks}
    idle = {tp: tuple(decisions) for tp, decisions in state.idle.items() if decisions}
    return {**vars(state), "heads": heads, "cuts": cuts, "idle": idle}


def replayed(lake: CaseLake, batch: int) -> State:
    history = read_history(lake.reader, lake.settings)
    return state_at(lake.reader, history, history.newest, batch)


@pytest.mark.parametrize("seed", first_then_nightly(seeds(2)))
@pytest.mark.parametrize("name", WINDOWS)
def test_a_state_that_is_replayed_is_the_one_that_was_carried_along(
    new_lake: MakeLake, name: str, seed: int
) -> None:
    """After any batch, with decisions of the idle policy, and through changes of the rules, also
    while clocks stand; from the beginning and from bases."""
    rng = random.Random(seed)
    windows = rng.sample(WINDOWS[name], 4)
    cases = (
        {p: tenant_case(10 * seed + p) for p in range(6)}
        if name == "tenants"
        else rich_cases(3, seed)
    )
    own = {"max_records_per_batch": 2 * len(cases) * rng.choice([2, 4, 1000])}
    keep = {"bronze": "4s"} if seed % 2 else {}  # a base each half second
    lake = new_lake(cases, merge={**merge_of(windows[0]), **own}, keep=keep)
    clock = Clock()
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    carried: dict[int, State] = {}
    shares = sorted(rng.random() for _ in range(5))
    for share in [*shares, 1.0]:
        if carried and rng.random() < 0.4:
            lake.settings = with_rules(lake.settings, rng.choice(windows))
            begin_epoch(lake.reader, lake.engine.append, lake.settings, max(carried) + 1)
        silver = lake.start(Quiet(lake.settings, 10_000, now_s=clock), lake.quick)
        lake.arrive(share)
        for _ in range(rng.choice([1, 3])):
            for plan in silver.drain():
                carried[plan.batch] = silver.recover().state
                assert told(replayed(lake, plan.batch)) == told(carried[plan.batch])
            clock.now += 10
        assert told(lake.start().recover().state) == told(silver.recover().state)
    for batch in rng.sample(sorted(carried), 5):
        assert told(replayed(lake, batch)) == told(carried[batch]), "as it was then"
    generation = read_history(lake.reader, lake.settings).generations.newest
    assert len(read_history(lake.reader, lake.settings).bases_in(generation)) > 1 or not keep
