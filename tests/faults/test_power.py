"""The power goes at any call that writes, names or syncs a file; afterwards everything is as if
nothing had happened. (`python -m tests.faults.power` does it for longer.)"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults.power import cut_again_and_again, not_durable
from tests.support import effort
from tests.support.forgetful import HAS_COMPILER, WHY, ForgetfulFolder
from tests.support.lakes import OpenSpark
from tests.support.rivers import EMBEDDED, FOLDER, Losses, River
from watersmeet.audit.verify import verify
from watersmeet.lake.location import Lake
from watersmeet.lake.log_files import checksum_of
from watersmeet.lake.torn import moved_aside

pytestmark = [
    pytest.mark.promise("N80"),
    pytest.mark.skipif(not HAS_COMPILER, reason=WHY),
    pytest.mark.timeout(1800),
    pytest.mark.fault("power", oracle=True),
]


@pytest.mark.long
@pytest.mark.parametrize("lake", effort.first_then_nightly([EMBEDDED, FOLDER]))
def test_what_a_layer_goes_on_from_is_on_the_disk_before_it_does(
    lake: str, kafka: str, tmp_path: Path
) -> None:
    name = f"durable-{lake}"
    more: dict[str, Any] = {"durable": True, "publish__late_topic": f"{name}-late"}
    river = River.make(kafka, tmp_path, name, lake=lake, **more)
    folder = ForgetfulFolder(Path(str(river.as_folder.lake)), tmp_path)

    for point in ("silver.merge", "letters.publish", "gold.publish", "gold.done"):
        river.flow()
        river.environment = folder.environment()
        run = river.run("--once", point=point)
        run.await_held()
        assert not_durable(folder) == [], f"at {point}"
        run.kill()
    river.environment = folder.environment()
    assert river.run("--once").wait() == 0, river.run_log[-3000:]
    assert not_durable(folder) == [], "at the end"
    river.environment = None
    assert river.losses() == Losses()


@pytest.mark.long
@pytest.mark.parametrize(
    ("lake", "seed"),
    [(lake, s) for lake, cases in ((EMBEDDED, 17), (FOLDER, 3)) for s in effort.seeds(cases)],
)
def test_after_power_cuts_at_any_moment_a_start_goes_on_by_itself_and_exactly(
    lake: str, seed: int, kafka: str, tmp_path: Path, open_spark: OpenSpark
) -> None:
    cuts, spark = 6 if effort.SEED else 2, open_spark() if lake == FOLDER else None
    cut_again_and_again(kafka, tmp_path, lake, seed, cuts, spark)


def test_verify_says_what_a_start_has_moved_aside(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "moved-aside", durable=True)
    folder = ForgetfulFolder(Path(str(river.as_folder.lake)), tmp_path)
    river.flow()
    river.finish()
    river.flow()
    river.environment = folder.environment()
    run = river.run("--once", point="bronze.done")
    run.await_held()
    run.kill()
    river.environment = None
    log = Path(str(river.as_folder.lake)) / "bronze_tracking" / "_delta_log"
    last = max(log.glob("0*.json"))
    last.write_bytes(last.read_bytes()[: random.Random(1).randrange(100)])
    checksum_of(last).unlink()  # as if it had not been on the disk yet
    river.finish()
    lake = Lake(river.settings)
    assert moved_aside(lake) == [f"bronze_tracking/_delta_log/aside/torn-{last.name}"]
    answer = verify(river.reader, river.settings, full=True)
    assert answer["ok"], answer
    assert any(moved_aside(lake)[0] in note for note in answer["notes"])
    assert river.losses() == Losses()
