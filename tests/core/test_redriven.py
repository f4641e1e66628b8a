"""What a record says of the refused one that it was: one header counts, whatever there are."""

from __future__ import annotations

import pytest

from watersmeet.core.headers import REDRIVEN, redriven_offset

pytestmark = [pytest.mark.promise("N50"), pytest.mark.fault("hostile")]

OTHER = ("n", b"1")


def claim(offset: int, place: str = "orders/3") -> tuple[str, bytes]:
    return REDRIVEN, f"{place}/{offset}".encode()


def test_the_last_claim_counts_with_what_the_record_had_before_it() -> None:
    assert redriven_offset("orders", 3, 9, [OTHER, claim(5)]) == (5, 1)
    assert redriven_offset("orders", 3, 9, [claim(5), claim(7), OTHER]) == (7, 1)
    assert redriven_offset("orders", 3, 9, [OTHER]) is None


@pytest.mark.parametrize(
    "last", [claim(9), claim(10), claim(5, "orders/2"), claim(5, "x/3"), (REDRIVEN, None)]
)
def test_one_of_no_earlier_record_of_the_partition_is_none_whatever_claims_come_before(
    last: tuple[str, bytes | None],
) -> None:
    assert redriven_offset("orders", 3, 9, [claim(5), last]) is None
