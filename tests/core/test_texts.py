"""What strangers have written steers no terminal."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from watersmeet.core.json_schema import ValueSchema
from watersmeet.core.texts import CONTROLS, number_of, printable, without_controls
from watersmeet.output import answer

pytestmark = pytest.mark.fault("hostile")

STEERING = ["\x1b[31m", "\x9b31m", "\u202e", "\u2066", "\x07", "\r", "\x7f", "\u2028"]


@given(st.text())
def test_what_is_printable_is_one_line_without_anything_that_steers(text: str) -> None:
    made = printable(text)
    assert made.isprintable()
    assert made == text or not text.isprintable()
    assert not CONTROLS.search(without_controls(text))
    assert without_controls(text) == text or CONTROLS.search(text)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 records"), (1, "1 record"), (2_000, "2,000 records")]
)
def test_a_noun_has_an_s_unless_it_is_one(number: int, text: str) -> None:
    assert number_of(number, "record") == text


@pytest.mark.promise("A37")
@pytest.mark.parametrize("steering", STEERING)
def test_an_answer_steers_no_terminal(steering: str, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = f"a{steering}b"

    def table(found: dict[str, str]) -> Table:
        made = Table("key")
        made.add_row(Text(found["key"]))
        return made

    answer({"key": hostile}, False, table)
    answer({"key": hostile}, False, lambda found: found["key"])
    answer({"key": hostile}, True, table)
    out = capsys.readouterr().out
    assert steering not in out.replace("\r\n", "\n")
    assert "a" in out
    assert json.loads(out.splitlines()[-1]) == {"key": hostile}


@pytest.mark.promise("A37")
@pytest.mark.parametrize("steering", [*STEERING, "\n"])
def test_a_violation_names_a_field_with_escapes(steering: str) -> None:
    closed = {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"q": {}}, "additionalProperties": False}
        },
        "additionalProperties": True,
    }
    deep = {
        "type": "object",
        "additionalProperties": {"type": "object", "additionalProperties": {"type": "string"}},
    }
    for schema, value in (
        (closed, {"a": {f"x{steering}y": 1}}),
        (deep, {"b": {f"x{steering}y": 1}}),
    ):
        violation = ValueSchema(json.dumps(schema), pa.struct([])).validator()(value)
        assert violation is not None
        assert violation.isprintable()
        assert "x" in violation
