"""A bit flips in a file of a lake: nothing comes of it, or it is named; no wrong message is sent.
(`python -m tests.faults.flipped` does it for longer; `tests/lake/test_flipped.py` has one of each
kind.)"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from tests.faults.flipped import flip_a_bit
from tests.support import effort
from tests.support.rivers import EMBEDDED, FOLDER


@pytest.mark.nightly
@pytest.mark.promise("N83")
@pytest.mark.fault("disk", oracle=True)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("lake", "seed"),
    [(lake, seed) for lake, cases in ((EMBEDDED, 2), (FOLDER, 1)) for seed in effort.seeds(cases)],
)
def test_a_flipped_bit_is_named_or_harmless_and_no_wrong_message_is_sent(
    lake: str, seed: int, kafka: str, tmp_path: Path
) -> None:
    with patch("os.fsync"):
        flip_a_bit(kafka, tmp_path, lake, seed)
