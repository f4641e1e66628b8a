from __future__ import annotations

import json
import math
import re
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.effort import draws
from watersmeet.core.values import double_text, json_texts, largest_sizes, typed_values

law = draws(30)

KIND = pa.struct(
    [
        ("s", pa.string()),
        ("n", pa.int64()),
        ("d", pa.float64()),
        ("b", pa.bool_()),
        ("list", pa.list_(pa.struct([("x", pa.int64()), ("t", pa.list_(pa.string()))]))),
        ('in"ner', pa.struct([("ds", pa.list_(pa.float64()))])),
    ]
)
DOUBLES = st.floats(allow_nan=False, allow_infinity=False)
INT64S = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(max_size=8) | st.text('"\\/\x00\x1f\n\t\x7f\u2028\U0001f600', max_size=4)


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Python values of a type, nulls included."""
    if pa.types.is_struct(kind):
        names, values = [field.name for field in kind], [values_of(field.type) for field in kind]
        inner: st.SearchStrategy[Any] = st.tuples(*values).map(
            lambda found: dict(zip(names, found, strict=True))
        )
    elif pa.types.is_list(kind):
        inner = st.lists(values_of(kind.value_type), max_size=3)
    else:
        inner = {
            pa.string(): TEXTS,
            pa.int64(): INT64S,
            pa.float64(): DOUBLES,
            pa.bool_(): st.booleans(),
        }[kind]
    return st.none() | inner


def as_bytes(*texts: str | None) -> pa.Array:
    return pa.array([None if text is None else text.encode() for text in texts], pa.binary())


def typed(field: str, spelled: str, kind: pa.DataType) -> Any:
    texts, kinds = as_bytes(f'{{"{field}":{spelled}}}'), pa.struct([(field, kind)])
    [row], [same] = (typed_values(texts, kinds, all_fit=fit).to_pylist() for fit in (True, False))
    assert repr(row) == repr(same)
    return row[field]


# -- from bytes to columns


def test_values_without_a_schema_are_their_text() -> None:
    texts = ['{"ts": 1.0,  "k" :"\\u00e9"}', None, " {}\n", '{"a":1e400,"a":2}']
    found = typed_values(as_bytes(*texts), pa.string())
    assert found.type == pa.string()
    assert found.to_pylist() == texts


@law
@given(rows=st.lists(values_of(KIND), max_size=4), escaped=st.booleans())
def test_a_value_that_fits_is_its_fields(rows: list[Any], escaped: bool) -> None:
    texts = [None if row is None else json.dumps(row, ensure_ascii=escaped) for row in rows]
    found = typed_values(as_bytes(*texts), KIND)
    assert found.type == KIND
    assert found.equals(pa.array(rows, KIND))


@law
@given(rows=st.lists(values_of(KIND), max_size=6), cut=st.integers(0, 6))
def test_values_become_columns_alike_in_any_chunks(rows: list[Any], cut: int) -> None:
    texts = as_bytes(*[None if row is None else json.dumps(row) for row in rows])
    chunks = typed_values(pa.chunked_array([texts[:cut], texts[cut:]], pa.binary()), KIND)
    assert chunks.combine_chunks().to_pylist() == typed_values(texts, KIND).to_pylist() == rows


@law
@given(rows=st.lists(st.none() | st.dictionaries(TEXTS, values_of(KIND), max_size=3), max_size=4))
def test_a_map_has_the_names_that_come_in_their_order(rows: list[Any]) -> None:
    kind = pa.struct([("m", pa.map_(pa.string(), KIND))])
    found = typed_values(as_bytes(*[json.dumps({"m": row}) for row in rows]), kind)
    assert found.equals(pa.array([{"m": row} for row in rows], kind))
    for text, row, bound in zip(
        json_texts(found).to_pylist(), rows, largest_sizes(found), strict=True
    ):
        assert repr(json.loads(text)) == repr({"m": row})
        assert len(text.encode()) <= bound


def test_missing_fields_are_null_and_others_are_dropped() -> None:
    [row] = typed_values(
        as_bytes('{"N":1,"more":[{"x":1.5}],"list":[{},null],"d":null}'), KIND
    ).to_pylist()
    assert row == {
        "s": None,
        "n": None,
        "d": None,
        "b": None,
        "list": [{"x": None, "t": None}, None],
        'in"ner': None,
    }


@law
@given(number=INT64S, exponent=st.integers(0, 25), after=st.integers(0, 20))
@example(2**53 + 1, 0, 1)
def test_an_integer_is_exact_in_every_spelling(number: int, exponent: int, after: int) -> None:
    spellings = [
        f"{number}",
        f"{number}.{'0' * (after + 1)}",
        f"{number}e0",
        f"{number}.{'0' * (exponent + 1)}E-0",
    ]
    spellings += [f"{number}{'0' * exponent}E-{exponent}"] if number else ["0e9999", "-0"]
    spellings += [f"{number // 10**exponent}e+{exponent}"] if number % 10**exponent == 0 else []
    for spelled in spellings:
        assert typed("n", spelled, pa.int64()) == number
        assert typed("list", f"[{spelled}]", pa.list_(pa.int64())) == [number]
        assert typed("map", f'{{"a":{spelled}}}', pa.map_(pa.string(), pa.int64())) == [
            ("a", number)
        ]


@pytest.mark.parametrize(
    ("spelled", "number"),
    [
        ("9007199254740992.5", 9_007_199_254_740_993),
        ("-9007199254740992.5", -9_007_199_254_740_993),
        ("4503599627370496.5", 4_503_599_627_370_497),
        ("0.99999999999999999999999", 1),
        ("1e-400", 0),
        ("0e9999", 0),
    ],
)
def test_what_only_a_double_takes_for_an_integer_is_rounded_half_up(
    spelled: str, number: int
) -> None:
    assert typed("n", spelled, pa.int64()) == number


@law
@given(number=DOUBLES)
@example(-0.0)
def test_a_double_is_the_closest_one(number: float) -> None:
    assert repr(typed("d", repr(number), pa.float64())) == repr(number)


@law
@given(number=st.integers(-(10**300), 10**300) | INT64S)
@example(2**53 + 1)
@example(2**64)
def test_an_integer_in_a_double_field_is_the_closest_double(number: int) -> None:
    assert typed("d", str(number), pa.float64()) == float(number)
    assert typed("list", f"[{number}, 1]", pa.list_(pa.float64())) == [float(number), 1.0]


@pytest.mark.parametrize("text", ["", "{"])
def test_a_value_that_is_no_json_raises(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        typed_values(as_bytes(text), KIND)


@pytest.mark.parametrize(
    "text", ['{"n":"1"}', '{"d":"1"}', '{"s":1}', '{"list":1}', '{"d":[]}', '{"n":{"a":1}}']
)
def test_a_field_that_does_not_fit_is_null_whatever_stands_beside_it(text: str) -> None:
    [name] = json.loads(text)
    good = '{"n": 7, "d": 1.5, "s": "x"}'
    for beside in ("", good, '{"s": 5}'):
        found = typed_values(as_bytes(*filter(None, [text, beside])), KIND).to_pylist()
        assert found[0][name] is None
    assert typed_values(as_bytes(text, good), KIND).to_pylist()[1]["n"] == 7


GAINED = pa.struct(
    [
        ("count", pa.int64()),
        ("share", pa.float64()),
        ("text", pa.string()),
        ("flag", pa.bool_()),
        ("object", pa.struct([("a", pa.int64())])),
        ("map", pa.map_(pa.string(), pa.int64())),
        ("tags", pa.list_(pa.string())),
    ]
)
MISFITS = [
    *[f'{{"count":{n}}}' for n in ("2.5", "1e19", "-9223372036854775809", "true", '"1"', "[]")],
    *[f'{{"share":{x}}}' for x in ("true", '"1"', "{}")],
    *[f'{{"text":{x}}}' for x in ("1", "false", "[]")],
    *[f'{{"flag":{x}}}' for x in ("1", '"true"', "0.0")],
    *[f'{{"object":{x}}}' for x in ("[]", "1", '"a"')],
    *[f'{{"map":{x}}}' for x in ("[]", '[["a",1]]', "0")],
    *[f'{{"tags":{x}}}' for x in ('"ab"', '""', "{}")],
]
"""Values of which one field has another type of JSON than `GAINED`."""


@pytest.mark.parametrize("text", MISFITS)
def test_a_value_depends_on_none_beside_it(text: str) -> None:
    nothing = dict.fromkeys(GAINED.names)
    for beside in ("{}", '{"count":"many"}', '{"share":1.5,"count":1e2}'):
        assert typed_values(as_bytes(text), GAINED).to_pylist() == [nothing]
        assert typed_values(as_bytes(text, beside), GAINED)[0].as_py() == nothing


@law
@given(rows=st.lists(values_of(KIND), max_size=4))
def test_values_that_all_fit_are_the_same_without_a_check(rows: list[Any]) -> None:
    texts = as_bytes(*[None if row is None else json.dumps(row) for row in rows])
    assert typed_values(texts, KIND, all_fit=True).equals(typed_values(texts, KIND))


# -- from columns to JSON


@law
@given(rows=st.lists(values_of(KIND), max_size=4))
def test_the_json_of_a_value_says_the_same(rows: list[Any]) -> None:
    texts = json_texts(pa.array(rows, KIND))
    assert texts.type == pa.large_string()
    for text, row in zip(texts.to_pylist(), rows, strict=True):
        assert repr(json.loads(text)) == repr(row)
        # Spelled alike by Python, but for control characters and large or small doubles.
        if not re.search(r"\\u00|[0-9]E", text):
            assert text == json.dumps(row, ensure_ascii=False, separators=(",", ":"))


@law
@given(rows=st.lists(values_of(KIND), max_size=5), since=st.integers(0, 5), until=st.integers(0, 5))
def test_a_slice_has_the_json_of_its_rows(rows: list[Any], since: int, until: int) -> None:
    whole = pa.array(rows, KIND)
    assert json_texts(whole[since:until]).to_pylist() == json_texts(whole).to_pylist()[since:until]


@law
@given(text=TEXTS)
def test_strings_are_escaped_as_little_as_json_allows(text: str) -> None:
    [found] = json_texts(pa.array([text])).to_pylist()
    assert found.encode() == re.sub(
        rb"\\u00..", lambda match: b"\\u" + match[0][2:].upper(), orjson.dumps(text)
    )


def test_control_characters_have_upper_case_digits() -> None:
    [found] = json_texts(pa.array(['\x1f\x0b\x7f\b\t\n\f\r"\\/\u2028é'])).to_pylist()
    assert found == '"\\u001F\\u000B\x7f\\b\\t\\n\\f\\r\\"\\\\/\u2028é"'


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.string()])
def test_any_kind_of_string_column_is_written(kind: pa.DataType) -> None:
    assert json_texts(pa.array(["a", None, '"'], kind)).to_pylist() == ['"a"', "null", '"\\""']


def test_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="no value of a source has the Arrow type"):
        json_texts(pa.array([1], pa.duration("s")))


@law
@given(rows=st.lists(values_of(KIND), max_size=4))
def test_no_json_is_larger_than_its_bound(rows: list[Any]) -> None:
    values = pa.array(rows, KIND)
    for text, bound in zip(json_texts(values).to_pylist(), largest_sizes(values), strict=True):
        assert len(text.encode()) <= bound


def test_the_bound_is_kept_by_the_longest_of_each_kind() -> None:
    longest = {
        "s": "\x00" * 9,
        "n": -(2**63),
        "d": -2.2250738585072014e-308,
        "b": False,
        "list": [None],
        'in"ner': None,
    }
    for field in KIND:
        values = pa.array([longest[field.name], None], field.type)
        assert all(
            len(text) <= bound
            for text, bound in zip(
                json_texts(values).to_pylist(), largest_sizes(values), strict=True
            )
        )


# -- doubles


@draws(250)
@given(number=DOUBLES)
def test_a_double_comes_back_from_its_text(number: float) -> None:
    text = double_text(number)
    back = float(text)
    assert (back, math.copysign(1, back)) == (number, math.copysign(1, number))
    assert re.fullmatch(r"-?(0|[1-9][0-9]*)\.[0-9]+|-?[1-9]\.[0-9]+E-?[1-9][0-9]*", text)
    assert ("E" in text) == (number != 0 and not 1e-3 <= abs(number) < 1e7)
    digits = [re.sub(r"[eE].*|[-.]", "", spelled).strip("0") for spelled in (text, repr(number))]
    assert len(digits[0]) <= max(2, len(digits[1]))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (1.0, "1.0"),
        (0.001, "0.001"),
        (9.999e-4, "9.999E-4"),
        (1e-5, "1.0E-5"),
        (9999999.999, "9999999.999"),
        (1e7, "1.0E7"),
        (-12345678.9, "-1.23456789E7"),
        (1e22, "1.0E22"),
        (2e23, "2.0E23"),
        (1.7976931348623157e308, "1.7976931348623157E308"),
        (2.2250738585072014e-308, "2.2250738585072014E-308"),
        (5e-324, "4.9E-324"),
        (-5e-324, "-4.9E-324"),
        (1e-323, "9.9E-324"),
        (1.5e-323, "1.5E-323"),
        (2e-323, "2.0E-323"),
    ],
)
def test_doubles_are_spelled_as_java_spells_them(number: float, text: str) -> None:
    assert double_text(number) == text
