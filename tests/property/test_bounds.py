"""The law of a data file's statistics: no value is outside them, as Spark compares texts (by their UTF-8), brief as they are."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.adapters.local import _LAST_CHARACTER, _TEXT_OF_BOUND, _lower, _upper

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text(
    st.sampled_from(["a", _LAST_CHARACTER]), max_size=40
)


@given(texts)
@example("a" * _TEXT_OF_BOUND + _LAST_CHARACTER)
@example(_LAST_CHARACTER * 40)
def test_no_text_is_outside_its_bounds(text: str) -> None:
    lower, upper = _lower(text), _upper(text)
    assert lower.encode() <= text.encode()
    assert upper is None or text.encode() <= upper.encode()
    assert len(lower) <= _TEXT_OF_BOUND
    assert upper is None or len(upper) <= _TEXT_OF_BOUND + 1
    assert (lower, upper) == (text, text) or len(text) > _TEXT_OF_BOUND
