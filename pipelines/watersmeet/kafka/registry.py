"""Schemas in a registry of Confluent's API.

The registry is not trusted with this process's time and memory: another process asks it
(`registry_client`), and ends where the answer takes too long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final, cast

from watersmeet.configuration.sources import RegistrySettings
from watersmeet.core import avro_schema
from watersmeet.core.avro_schema import EXCESS, UNKNOWN, AvroSchema
from watersmeet.core.reading import ReadingRules
from watersmeet.core.recent import Recent
from watersmeet.errors import (
    ConfigurationError,
    RegistryAccessError,
    RegistryUnreachableError,
    UnknownWriterSchemaError,
    missing_package,
)
from watersmeet.kafka.registry_client import TOO_LARGE, OptionsError, client_of
from watersmeet.settings import Settings

DEADLINE_S: Final = 6.0
"""Seconds for a whole answer, with all references: less than a stop of the run may take."""

QUIET_S: Final = 5.0
"""Seconds for which a registry that failed is not asked again: a stop waits for one answer."""

_REFUSALS: Final = frozenset([401, 403, 407])

_texts = Recent[str](avro_schema.MAX_SCHEMAS_BYTES)
"""Texts of schemas by registry and id, for which one stands for ever."""


def rules_of(
    settings: Settings,
    source: str,
    given_up: Collection[int] = (),
    kept: Mapping[int, str] = MappingProxyType({}),
    *,
    is_full: bool = False,
    most: int | None = None,
) -> ReadingRules:
    """Return the rules for reading a source's records, with its `Registry` where it has one."""
    rules = settings.reading_rules(source)
    if isinstance(rules.schema, AvroSchema) and source in settings.registries:
        registry = settings.registries[source]
        writers = Registry(registry, given_up, kept, is_full=is_full, most=most)
        rules = replace(rules, schema=replace(rules.schema, writers=writers))
    return rules


class Registry(Mapping[int, str]):
    """The schemas of a registry by id, each with all that it refers to. It pickles.

    `given_up`: ids that have been waited for long enough (`UNKNOWN` if there is none). `kept`:
    schemas by id for which the registry is not asked. `is_full`: the source takes no others, and
    `most`: how many are asked for; any other schema is `EXCESS`.

    To ask for one raises a RegistryError, or ConfigurationError for options that it does not take.
    """

    def __init__(
        self,
        settings: RegistrySettings,
        given_up: Collection[int] = (),
        kept: Mapping[int, str] = MappingProxyType({}),
        *,
        is_full: bool = False,
        most: int | None = None,
    ) -> None:
        self._settings = settings
        self._name = settings.model_dump_json()
        self._given_up = frozenset(given_up)
        self._kept = dict(kept)
        self._is_full = is_full
        self._most = most
        self._missing: set[int] = set()
        self._named: set[int] = set()

    def __getitem__(self, schema_id: int) -> str:
        if schema_id in self._kept:
            return self._kept[schema_id]
        if self._is_full:
            return EXCESS
        if schema_id not in self._named:
            if self._most is not None and len(self._named) >= self._most:
                return EXCESS
            self._named.add(schema_id)
        if schema_id in self._missing:
            return UNKNOWN
        try:
            return _texts.get((self._name, schema_id), lambda: str(self._ask(schema_id)), len)
        except UnknownWriterSchemaError:
            if schema_id not in self._given_up:
                raise
            self._missing.add(schema_id)
            return UNKNOWN

    def __iter__(self) -> Iterator[int]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    def check_options(self) -> None:
        """Raise ConfigurationError for options that the client does not take; nothing is asked."""
        try:
            client_of(self._settings.url, dict(self._settings.options), DEADLINE_S)
        except ImportError as error:
            raise missing_package(error) or error from None
        except OptionsError as error:
            raise _refused_options(error.reason) from None

    def check(self) -> None:
        """Raise, as asking for a schema does, where the registry cannot be used."""
        self._ask(None)

    def _ask(self, schema_id: int | None) -> str | None:
        url = self._settings.url
        bounds = {"timeout_s": DEADLINE_S, "max_bytes": avro_schema.MAX_BYTES}
        options = dict(self._settings.options)
        match _helper().ask({"url": url, "options": options, "schema_id": schema_id, **bounds}):
            case {"text": text, "references": references}:
                return avro_schema.self_contained(text, references)
            case {"unknown": unknown}:
                raise UnknownWriterSchemaError(url, unknown)
            case answer if (error := _failure(url, answer)) is not None:
                raise error
        return None


def _failure(url: str, answer: Mapping[str, Any] | None) -> Exception | None:
    match answer:
        case None:
            return RegistryUnreachableError(url, f"no whole answer within {DEADLINE_S:.0f} s")
        case {"missing": name}:
            error = ImportError(f"No module named {name!r}", name=name)
            return missing_package(error) or error
        case {"options": reason}:
            return _refused_options(reason)
        case {"status": status}:
            refuses = status in _REFUSALS
            kind = RegistryAccessError if refuses else RegistryUnreachableError
            return kind(url, f"HTTP status {status}")
        case {"tls": _}:
            return RegistryAccessError(url, "TLS")
        case {"trouble": why}:
            return RegistryUnreachableError(url, str(why))
    return None


def _refused_options(reason: str | None) -> ConfigurationError:
    if reason is None:
        return ConfigurationError(
            "a file that registry.options name cannot be read", fix="correct its path"
        )
    return ConfigurationError(
        f"the client of schema registries does not take its options ({reason})",
        fix="correct registry.options",
    )


# -- the process that asks

_COMMAND: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); from "
    "watersmeet.kafka.registry_client import main; main()"
)


class _Helper:
    """A process that asks registries, one question at a time; it is started when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._quiet: dict[str, tuple[float, dict[str, Any] | None]] = {}
        """By URL, until when (monotonic) a registry is not asked, and its last answer."""

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any] | None:
        # None where there is no answer before the deadline.
        with self._lock:
            until, last = self._quiet.get(question["url"], (0.0, None))
            if time.monotonic() < until:
                return last
            if self._process is None or self._process.poll() is not None:
                # Isolated (-I), so that nothing of the current folder is imported; with one arena,
                # since memory that threads only reserve counts towards the limit, too.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _COMMAND],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, "MALLOC_ARENA_MAX": "1"},
                )
                import_paths = [str(Path(path).absolute()) for path in sys.path if path]
                started = self._say(self._process, import_paths)
                if started != {}:
                    return started
            answer = self._say(self._process, question)
            if answer is None or answer.get("trouble") == TOO_LARGE:
                self._process.kill()
                self._process.wait()
                self._quiet[question["url"]] = time.monotonic() + QUIET_S, answer
            return answer

    @staticmethod
    def _say(process: subprocess.Popen[str], line: Any) -> dict[str, Any] | None:
        # None where the process has ended, also by its own deadline.
        questions = cast(IO[str], process.stdin)
        answers = cast(IO[str], process.stdout)
        try:
            questions.write(json.dumps(line) + "\n")
            questions.flush()
            reply = answers.readline()
        except OSError:
            return None
        return dict(json.loads(reply)) if reply.endswith("\n") else None


_helpers: dict[int, _Helper] = {}
"""The helper of each process, by its id: a helper does not survive a fork."""


def _helper() -> _Helper:
    return _helpers.setdefault(os.getpid(), _Helper())
