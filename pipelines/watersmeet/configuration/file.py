"""The reading of the configuration's file, and the wording of what is wrong with it."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from watersmeet.errors import Problem


class RefusedError(ValueError):
    """What is wrong, `at` which place inside, and its fix; {path}, {value}, {kind} are open."""

    def __init__(self, what: str, *at: str, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.at = at
        self.fix = fix


class FromEnvironment(str):
    """Text that holds the value of an environment variable, and so is never shown."""

    names: str


# -- the file

_LARGEST_SIZE: Final = 1_000_000
"""Maximum characters with aliases written out, unless the file itself has more."""
_COMPARED: Final = "equals"
_PASSED_ON: Final = frozenset(["options", "storage", "spark"])
ANY: Final = "*"
"""Name in the path of a field that stands for that of any source."""
_MERGE: Final = "tag:yaml.org,2002:merge"


def read_values(
    path: Path, environ: Mapping[str, str], kept: Collection[tuple[str, ...]]
) -> object:
    """Return the file's mapping, with every variable filled in. Raises RefusedError.

    `kept`: paths of the fields that the lake keeps, which take no variable.
    """
    try:
        content = path.read_bytes()
        loader = yaml.SafeLoader(content)
        document = loader.get_single_node()
        limit = max(_LARGEST_SIZE, 2 * len(content))
        if document is not None and _size(document, {}) > limit:
            what = f"is not usable YAML: its aliases stand for more than {limit} characters"
            raise RefusedError(what, fix="write them out")
        _check_fields(document, (), set(), loader)
        values: object = None if document is None else loader.construct_document(document)
        repr(values)  # refuses hexadecimal digits that stand for too many decimal ones
    except OSError as error:
        fix = "name another file with -c, or write one with `init`"
        raise RefusedError(f"cannot be read ({error.strerror})", fix=fix) from None
    except yaml.YAMLError as error:
        raise RefusedError(_yaml_problem(error)) from None
    except RefusedError:
        raise
    except (ValueError, LookupError, AttributeError, TypeError):
        what = "is not valid YAML: a value does not fit its tag or type"
        raise RefusedError(what, fix="put text in quotes") from None
    if values is None:
        raise RefusedError("is empty", fix="write a configuration, or let `init` write an example")
    if not isinstance(values, dict):
        raise RefusedError(f"must be a mapping of fields, not {_kind_of(values)}")
    return _substituted(values, environ, kept)


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    # PyYAML quotes an alias or a tag, which may be a secret: a value that lacks its quotes.
    problem = getattr(error, "problem", None) or "unreadable characters"
    what = re.sub(r"(alias|anchor|handle|tag) .*", r"\1", problem)
    return f"is not valid YAML{where}: {what}"


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    # Of all aliases written out. Raises RecursionError where a node contains itself.
    if id(node) not in sizes:
        size = 1 + len(node.value)
        if not isinstance(node, yaml.ScalarNode):
            for item in node.value:
                parts = item if isinstance(item, tuple) else (item,)
                size += sum(_size(part, sizes) for part in parts)
        sizes[id(node)] = size
    return sizes[id(node)]


def _check_fields(
    node: yaml.Node | None, at: tuple[str, ...], seen: set[int], loader: yaml.SafeLoader
) -> None:
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        _refuse_surrogates(node.value, at)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_fields(item, at, seen, loader)
    elif isinstance(node, yaml.MappingNode):
        names: set[object] = set()
        for key, value in node.value:
            name = _checked_name(key, at, names, loader)
            place = at if key.tag == _MERGE else (*at, name)
            # A scalar without quotes that YAML takes for something else than it looks like matters
            # where records are compared with it, and where it is passed on as text.
            if isinstance(value, yaml.ScalarNode) and value.style is None and value.value:
                if place[-1:] == (_COMPARED,):
                    _refuse_other_json(value.value, loader.construct_object(value), place)
                elif place[-2:-1] and place[-2] in _PASSED_ON:
                    _refuse_other_text(value.value, loader.construct_object(value), place)
            _check_fields(value, place, seen, loader)


def _checked_name(
    key: yaml.Node, at: tuple[str, ...], names: set[object], loader: yaml.SafeLoader
) -> str:
    name = str(key.value)
    _refuse_surrogates(name, (*at, name))
    same: set[object] = {name}
    if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
        same.add(loader.construct_object(key))  # `0` and `00` are one number
    if names & same:  # YAML would silently keep the last one
        what = f"field `{{path}}` is repeated in line {key.start_mark.line + 1}"
        raise RefusedError(what, *at, name, fix="keep one")
    names |= same
    return name


def _refuse_surrogates(text: str, at: tuple[str, ...]) -> None:
    if at and not _is_utf_8(text):  # a file that is text alone is refused as such
        raise RefusedError(
            "{path}: half a surrogate pair is no text",
            *(name.encode(errors="backslashreplace").decode() for name in at),
            fix="write the character itself, or its number after `\\U` with eight digits",
        )


def _is_utf_8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_other_json(spelled: str, value: object, at: tuple[str, ...]) -> None:
    try:
        json_value = json.loads(spelled)
    except ValueError:
        json_value = spelled
    if type(json_value) is type(value) and json_value == value:
        return
    if isinstance(value, float) and not math.isfinite(value):  # which nothing can equal
        return
    other = _as_json(json_value if isinstance(value, str) else value)
    instead = f", or `{other}` for {_kind_of(json.loads(other))}" if other else ""
    raise RefusedError(
        f"{{path}}: `{spelled}` is {_kind_of(value)} in YAML, which its spelling does not say",
        *at,
        fix=f'write `"{spelled}"` for the text{instead}',
    )


def _refuse_other_text(spelled: str, value: object, at: tuple[str, ...]) -> None:
    if not isinstance(value, str) and _as_json(value) != spelled:
        what = f"{{path}} is {_kind_of(value)} in YAML, and not as it is spelled"
        raise RefusedError(what, *at, fix="put it in quotes")


def _as_json(value: object) -> str | None:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None


def _substituted(
    value: object, environ: Mapping[str, str], kept: Collection[tuple[str, ...]], *at: str
) -> object:
    # Once: what a variable holds is not searched again.
    if isinstance(value, dict):
        return {
            key: _substituted(item, environ, kept, *at, str(key)) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_substituted(item, environ, kept, *at) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if at[:2] in kept or (*at[:1], ANY, *at[2:3]) in kept:
        raise RefusedError(
            "{path} must not have `${`: a rule is kept with the lake for ever, where everybody who "
            "reads the lake sees it, and must be the same wherever it is used",
            *at,
            fix="write it out, without secrets",
        )
    names: list[str] = []

    def lookup(match: re.Match[str]) -> str:
        name = match[1] or ""
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise RefusedError(
                "{path}: `${` must be followed by the name of an environment variable and `}`", *at
            )
        if name not in environ:
            raise RefusedError(
                f"{{path}}: the environment variable {name} is not set", *at, fix="set it"
            )
        if not _is_utf_8(environ[name]):
            what = f"{{path}}: the environment variable {name} is not UTF-8"
            raise RefusedError(what, *at, fix="set it to text in UTF-8")
        names.append(f"${{{name}}}")
        return environ[name]

    text = FromEnvironment(re.sub(r"\$\{(?:([^{}]*)\})?", lookup, value))
    text.names = "".join(names)
    return text


# -- problems


_NO_LIST = Problem(
    "{path} must be a list, not {kind}", fix="write one entry a line, each after a dash"
)
_PROBLEMS = {
    "dict_type": Problem("{path} must be a mapping, not {kind}"),
    "list_type": _NO_LIST,
    "literal_error": Problem(
        "{path}: {value} is not one of the values it may have", fix="use {expected}"
    ),
    "model_type": Problem("{path} must be a mapping, not {kind}"),
    "start": Problem(
        "{path}: {value} is not one of the values it may have",
        fix="use earliest, latest, sink, `{timestamp: ...}` or `{offsets: ...}`",
    ),
    "string_pattern_mismatch": Problem("{path} must not be empty"),
    "string_type": Problem("{path} must be text, not {kind}", fix="put text in quotes"),
    "tuple_type": _NO_LIST,
    "too_short": Problem("{path} must have {min_length} or more entries, not {actual_length}"),
}
"""What pydantic finds, by the type of its error, with the facts that it gives open."""


def problems_of(error: ValidationError) -> list[Problem]:
    """Return what is wrong, the first problem of each place, with its place."""
    problems = dict[tuple[str, ...], Problem]()
    for fault in error.errors(include_url=False):
        # Pydantic puts the kinds of a union into the place, and a word where a key is wrong.
        at = tuple(s for s in map(str, fault["loc"]) if not re.fullmatch(r"<.*>|\[key\]", s))
        if not any(at[: len(other)] == other or other[: len(at)] == at for other in problems):
            problems[at] = _problem_at(at, fault)
    return list(problems.values())


def _problem_at(at: tuple[str, ...], fault: Any) -> Problem:
    facts: dict[str, Any] = fault.get("ctx", {})
    refusal = facts.get("error")
    if isinstance(refusal, RefusedError):
        return problem_of(refusal, at + refusal.at, fault["input"])
    problem = _PROBLEMS.get(fault["type"], Problem(fault["msg"]))
    return problem_of(problem, at, fault["input"], **facts)


def problem_of(
    open_problem: Problem | RefusedError, at: tuple[str, ...], value: object = None, **facts: object
) -> Problem:
    """Return a problem, each part on one line, with its place, value and facts filled in."""
    filled = {name: str(fact).replace("'", "") for name, fact in facts.items()}
    place = " ".join(".".join(at).split())
    filled |= {"path": place, "value": _shown(value), "kind": _kind_of(value)}

    def fill(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: filled.get(match[1], match[0]), text)

    return Problem(fill(open_problem.what), fix=fill(open_problem.fix))


def _shown(value: object) -> str:
    if isinstance(value, FromEnvironment):
        return f"the value of {value.names}"
    if isinstance(value, Mapping):
        return f"`{{{', '.join(f'{key}: ...' for key in value)}}}`"
    if value is None or isinstance(value, (bool, list)):
        return _kind_of(value)
    text = " ".join(str(value).split())
    return f"`{text if len(text) <= 80 else text[:77] + '...'}`"


def _kind_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds: dict[Any, str] = {
        str: "text",
        (int, float): "a number",
        Mapping: "a mapping",
        list: "a list",
        date: "a date",
    }
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "a tagged value")


def known_instead(unknown: str, names: list[str]) -> str:
    """Return a hint: the names that are close to an unknown one, or else all of them."""
    close = [f"`{name}`" for name in difflib.get_close_matches(unknown, names, n=2)]
    return f"did you mean {' or '.join(close)}?" if close else f"known here: {', '.join(names)}"
