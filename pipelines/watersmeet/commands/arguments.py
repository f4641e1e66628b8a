"""Arguments that commands share; what parses them raises ConfigurationError for nonsense."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from watersmeet.configuration.values import parse_duration
from watersmeet.core.times import LAST_EVENT_TIME_MS, parse_iso_8601
from watersmeet.core.window import Window
from watersmeet.errors import ConfigurationError

Config = Annotated[
    Path,
    typer.Option(
        "--config", "-c", help="The configuration file; also accepted before the command."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on standard output, nothing else there.")
]
DEFAULT_CONFIG = Path("watersmeet.yml")


def as_utf_8(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """Return an argument's text, whatever the locale's encoding. Raises ConfigurationError."""
    if text is None:
        return None
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        fix = "write it in UTF-8, as records have it"
        where = _name_of(parameter)
        raise ConfigurationError("it is not UTF-8", where=where, fix=fix) from None


def as_local(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the path of a file or folder of this machine. Raises ConfigurationError for a URI."""
    # A path has lost one of the slashes.
    if path and (scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", str(path))):
        raise ConfigurationError(
            f"`{scheme[1]}://` begins a URI",
            where=_name_of(parameter),
            fix="name a path on this machine, without a scheme",
        )
    return path


def _name_of(parameter: typer.CallbackParam) -> str:
    is_option = parameter.param_type_name == "option"
    return parameter.opts[0] if is_option else str(parameter.name).upper()


Key = Annotated[
    str | None,
    typer.Argument(
        help="The key of merge records; behind `--` where it begins with a dash.", callback=as_utf_8
    ),
]
KeyJson = Annotated[
    str | None,
    typer.Option(
        "--key-json",
        help="The key as a JSON string, instead: for one that a command line cannot spell, such as "
        "'\"a\\u0000b\"'.",
    ),
]


def parse_key(key: str | None, key_json: str | None) -> str:
    """Return the key that one of the two names."""
    if key is not None and key_json is None:
        return key
    if key is not None or key_json is None:
        raise ConfigurationError(
            "no key is named" if key is None else "two keys are named",
            where="KEY, --key-json",
            fix="give one of them, KEY behind `--` where it begins with a dash",
        )
    try:
        parsed = json.loads(key_json)
    except ValueError:
        parsed = None
    if not isinstance(parsed, str):
        raise ConfigurationError(
            f"`{key_json}` is no JSON string",
            where="--key-json",
            fix="write the key in double quotes, inside of single quotes for the shell",
        )
    try:
        parsed.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            "half a surrogate pair is no text",
            where="--key-json",
            fix="look for its record in quarantine: as `undecodable`, it has no key",
        ) from None
    return parsed


def parse_target(to: str) -> str | int:
    """Return where `reset` jumps to: a word, or a time in ms."""
    if to in ("earliest", "latest"):
        return to
    return parse_time_ms("--to", to, "earliest, latest or ")


_MOST_DIGITS = 18
"""Of a version; Delta numbers them by 64-bit integers."""


def parse_as_of(option: str, text: str) -> int | datetime:
    """Return a version of silver, or a time."""
    if text.isdecimal() and len(text) <= _MOST_DIGITS:
        return int(text)
    return datetime.fromtimestamp(
        parse_time_ms(option, text, "a version of silver or ") / 1000, timezone.utc
    )


def parse_window(timeout: str | None, gap: str | None, longest: str | None) -> Window | None:
    """Return another window than the lake's, if the options ask for one."""
    if (gap is None) != (longest is None) or (timeout is not None and gap is not None):
        raise ConfigurationError(
            "one of a pair is missing", where="--gap, --max", fix="give both, or --timeout alone"
        )
    if gap is not None and longest is not None:
        window = Window(parse_length("--gap", gap), parse_length("--max", longest))
        if not 0 < window.gap_ms <= window.longest_ms:
            raise ConfigurationError(
                f"--gap, --max: from `{gap}` to `{longest}` is no window",
                fix="give a gap that is no longer than the max",
            )
        return window
    timeout_ms = None if timeout is None else parse_length("--timeout", timeout)
    if timeout_ms == 0:
        fix = "give one that is longer than nothing, such as `30m`"
        raise ConfigurationError(f"`{timeout}` is too short", where="--timeout", fix=fix)
    return None if timeout_ms is None else Window(timeout_ms)


def parse_length(option: str, text: str) -> int:
    """Return a duration in ms."""
    try:
        return parse_duration(text)
    except ConfigurationError as error:
        raise ConfigurationError(*error.problem._replace(where=option)) from None


def parse_time_ms(option: str, text: str, others: str = "") -> int:
    """Return a time in epoch ms; `others`: what else the option takes, for the error."""
    time_ms = parse_iso_8601(text)
    if time_ms is None:
        raise ConfigurationError(
            f"`{text}` is not a time",
            where=option,
            fix=f"use {others}a time such as 2026-01-01T00:00:00Z",
        )
    if not 0 <= time_ms <= LAST_EVENT_TIME_MS:
        raise ConfigurationError(
            f"`{text}` is out of range", where=option, fix="give a time from 1970 to the year 9999"
        )
    return time_ms
