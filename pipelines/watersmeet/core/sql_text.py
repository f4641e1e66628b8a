"""Checks on the text of an SQL expression: functions that it calls, dates that are not fixed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_PURE: Final = """
abs acos acosh add_months aes_decrypt aggregate all and array array_append array_compact
array_contains array_distinct array_except array_insert array_intersect array_join array_max
array_min array_position array_prepend array_remove array_repeat array_size array_sort array_union
arrays_overlap arrays_zip as ascii asin asinh assert_true atan atan2 atanh base64 between bigint bin
binary bit_count bit_get bit_length bitmap_bit_position bitmap_bucket_number bitmap_count boolean
bround btrim by cardinality case cast cbrt ceil ceiling char char_length character character_length
chr coalesce collate collation concat concat_ws contains conv convert_timezone cos cosh cot crc32
csc date date_add date_diff date_format date_from_unix_date date_part date_sub date_trunc dateadd
datediff datepart day dayname dayofmonth dayofweek dayofyear dec decimal decode degrees distinct div
double e element_at else elt encode endswith equal_null exists exp expm1 extract factorial filter
find_in_set flatten float floor forall format_number format_string from from_avro from_csv from_json
from_unixtime from_utc_timestamp from_xml get get_json_object getbit greatest hash hex hour hypot if
ifnull ilike in initcap instr int interval is is_valid_utf8 is_valid_variant is_variant_null isnan
isnotnull isnull json_array_length json_object_keys last_day lcase least left len length levenshtein
like ln locate log log10 log1p log2 lower lpad ltrim luhn_check make_date make_dt_interval
make_interval make_time make_timestamp make_timestamp_ltz make_timestamp_ntz make_valid_utf8
make_ym_interval map map_concat map_contains_key map_entries map_filter map_from_arrays
map_from_entries map_keys map_values map_zip_with mask md5 minute mod month monthname months_between
named_struct nanvl negative next_day not nullif nullifzero numeric nvl nvl2 octet_length on or
overlay parse_json parse_url pi pmod position positive pow power printf quarter quote radians
raise_error reduce regexp regexp_count regexp_extract regexp_extract_all regexp_instr regexp_like
regexp_replace regexp_substr repeat replace reverse right rint rlike round rpad rtrim schema_of_avro
schema_of_csv schema_of_json schema_of_variant schema_of_xml sec second sentences sequence sha sha1
sha2 shiftleft shiftright shiftrightunsigned sign signum similar sin sinh size slice smallint
sort_array soundex space split split_part sqrt st_asbinary st_geogfromwkb st_geomfromwkb st_setsrid
st_srid startswith str_to_map string struct substr substring substring_index tan tanh then time
time_bucket time_diff time_from_micros time_from_millis time_from_seconds time_to_micros
time_to_millis time_to_seconds time_trunc timestamp timestamp_micros timestamp_millis
timestamp_seconds timestampadd timestampdiff tinyint to_avro to_binary to_char to_csv to_date
to_json to_number to_time to_timestamp to_timestamp_ltz to_timestamp_ntz to_unix_timestamp
to_utc_timestamp to_varchar to_variant_object to_xml transform transform_keys transform_values
translate trim trunc try_add try_aes_decrypt try_cast try_divide try_element_at try_make_interval
try_make_timestamp try_make_timestamp_ltz try_make_timestamp_ntz try_mod try_multiply try_parse_json
try_parse_url try_subtract try_to_binary try_to_date try_to_number try_to_time try_to_timestamp
try_url_decode try_validate_utf8 try_variant_get typeof ucase unbase64 unhex unix_date unix_micros
unix_millis unix_seconds unix_timestamp upper url_decode url_encode validate_utf8 varchar
variant_get vector_cosine_similarity vector_inner_product vector_l2_distance vector_norm
vector_normalize weekday weekofyear when width_bucket xpath xpath_boolean xpath_double xpath_float
xpath_int xpath_long xpath_number xpath_short xpath_string xxhash64 year zeroifnull zip_with
"""
PURE: Final = frozenset(_PURE.split())
"""Names that may stand before a bracket: functions of Spark, types, and words of SQL.

The functions work on a row and give the same for the same arguments, on every machine and at any
time, with the settings that are pinned. `aes_encrypt` is checked in the plan.
"""
_WORDS = """
all as by character dec distinct else from interval is numeric on similar then timestampadd
timestampdiff try_cast varchar
"""
WORDS: Final = frozenset(_WORDS.split())
"""The names in `PURE` that are no functions of Spark's; a function of that name is somebody's own.
"""

_TOKEN: Final = re.compile(
    r"""(?P<comment>--(?:\\\n|[^\r\n])*)"""
    r"""|(?P<raw>(?<!\w)[rR](?:'[^']*'|"[^"]*"))"""
    r"""|(?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")"""
    r"""|(?P<name>`(?:[^`]|``)*`)""",
    re.DOTALL,
)
_CALL: Final = re.compile(r"((?:[\w`]+\s*\.\s*)*[\w`]+)\s*\(")
_TYPED: Final = re.compile(r"\b(date|time|timestamp(?:_ltz|_ntz)?)\s*$", re.IGNORECASE)
_ESCAPE: Final = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-3][0-7]{2})|(.))", re.DOTALL
)
_FIXED: Final = re.compile(
    r"\s*(?:epoch\s*|[+-]?\d{4,7}(?:-\d{1,2}(?:-\d{1,2}(?:[ T].*|\s*))?)?)",
    re.IGNORECASE | re.DOTALL,
)


class SqlText(NamedTuple):
    """The string literals of an expression, and everything else."""

    texts: tuple[tuple[str, str], ...]
    """Each literal with what stands before it."""
    rest: str
    """The expression without comments, with `''` for each literal."""


def read_sql(sql: str) -> SqlText:
    """Return the parts of an expression, split as Spark's lexer does with the pinned settings."""
    texts: list[tuple[str, str]] = []
    rest = ""
    at = 0
    for token in _TOKEN.finditer(sql):
        between = sql[at : token.start()]
        at = token.end()
        rest += between
        if token["comment"]:
            rest += " "
        elif token["name"]:
            rest += token["name"] if re.fullmatch(r"`\w*`", token["name"]) else "`?`"
        else:
            literal = token["raw"][2:-1] if token["raw"] else _unescaped(token["text"][1:-1])
            if texts and rest.rstrip().endswith("''"):  # adjacent texts are one
                texts[-1] = texts[-1][0] + literal, texts[-1][1]
                continue
            texts.append((literal, rest[-40:]))
            rest += "''"
    return SqlText(tuple(texts), rest + sql[at:])


def _unescaped(text: str) -> str:
    def character(escape: re.Match[str]) -> str:
        """Return the character that an escape stands for."""
        if code := escape[1] or escape[2]:
            return chr(int(code, 16) % 0x110000)
        return chr(int(escape[3], 8)) if escape[3] else escape[4]

    return _ESCAPE.sub(character, text)


def impurities(sql: str) -> Iterator[str]:
    """Yield each reason why an expression may give another result in another run.

    Only what can be seen in its text is found.
    """
    parts = read_sql(sql)
    if "/*" in parts.rest or "$" in parts.rest:
        yield (
            "it has a comment in brackets, or `$` outside of a text, in which something else could "
            "hide"
        )
    for match in _CALL.finditer(parts.rest):
        name = re.sub(r"[`\s]", "", match[1]).lower()
        if name not in PURE and name != "aes_encrypt":
            yield (
                f"`{name}` is no function that is known to give the same for the same arguments in "
                "every run"
            )
    for text, before in parts.texts:
        if (
            (typed := _TYPED.search(before))
            and typed[1].lower() != "time"
            and not _FIXED.fullmatch(text)
        ):
            yield f"`{typed[1]} {text!r}` is another time in every run; write year, month and day"


def is_fixed_time(text: str) -> bool:
    """Return True where a text, or a number, stands for the same date or time in every run."""
    return _FIXED.fullmatch(text) is not None or re.fullmatch(r"[+-]?[\d.]*", text) is not None


def is_moment(text: str) -> bool:
    """Return True where Spark, if it reads a text as a date or time, reads another in every run."""
    return (
        re.match(r"\s*(?:now|today|tomorrow|yesterday|T?\d{1,2}:)", text, re.IGNORECASE) is not None
    )
