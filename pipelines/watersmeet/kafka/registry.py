"""Schemas in a registry of Confluent's API.

The registry is not trusted with this process's time and memory: another process asks it
(`registry_client`), and is ended where the answer takes too long.
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
from typing import IO, Any, Final, cast

from watersmeet.configuration.sources import RegistrySettings
from watersmeet.core.avro_schema import (
    EXCESS,
    MAX_BYTES,
    MAX_SCHEMAS_BYTES,
    UNKNOWN,
    AvroSchema,
    self_contained,
)
from watersmeet.core.reading import ReadingRules
from watersmeet.core.recent import Recent
from watersmeet.errors import (
    ConfigurationError,
    RegistryAccessError,
    RegistryUnreachableError,
    UnknownWriterSchemaError,
    missing_package,
)
from watersmeet.kafka.registry_client import OptionsError, client_of
from watersmeet.settings import Settings

DEADLINE_S: Final = 6.0
"""Seconds that a registry has for a whole answer, with all that a schema refers to: less than a
stop of the run may take.
"""

QUIET_S: Final = 5.0
"""Seconds for which a process does not ask again a registry that has not answered, or with too
much: a stop waits for one answer alone.
"""

_NOT_FOUND: Final = 404
_REFUSALS: Final = frozenset([401, 403, 407])

_texts = Recent[str](MAX_SCHEMAS_BYTES)
"""Texts of schemas by registry and id. An id stands for the same schema for ever, so a process asks
for none twice that it has used lately.
"""


def rules_of(
    settings: Settings,
    source: str,
    given_up: Collection[int] = (),
    allowed: Collection[int] | None = None,
    *,
    most: int | None = None,
) -> ReadingRules:
    """Return the rules for reading a source's records, with the schemas of their writers where a
    registry has them.

    `given_up`, `allowed`, `most`: see `Registry`.
    """
    rules = settings.reading_rules(source)
    if isinstance(rules.schema, AvroSchema) and source in settings.registries:
        writers = Registry(settings.registries[source], given_up, allowed, most)
        rules = replace(rules, schema=replace(rules.schema, writers=writers))
    return rules


class Registry(Mapping[int, str]):
    """The schemas of a registry by id, each with all that it refers to. It pickles.

    `given_up`: ids that have been waited for long enough. Where the registry still does not have
    one, it is `UNKNOWN`. `allowed`: ids of all schemas that the source takes; None: it takes any.
    `most`: for how many the registry is asked; None: for any number. Any other schema is `EXCESS`.

    To ask for a schema raises:

    - UnknownWriterSchemaError where there is none;
    - RegistryAccessError where the client is refused;
    - RegistryUnreachableError where there is no answer;
    - ConfigurationError for options that the client does not take.
    """

    def __init__(
        self,
        settings: RegistrySettings,
        given_up: Collection[int] = (),
        allowed: Collection[int] | None = None,
        most: int | None = None,
    ) -> None:
        self._settings = settings
        self._name = settings.model_dump_json()
        self._given_up = frozenset(given_up)
        self._allowed = None if allowed is None else frozenset(allowed)
        self._most = most
        self._missing: set[int] = set()
        self._named: set[int] = set()

    def __getitem__(self, schema_id: int) -> str:
        if self._allowed is not None and schema_id not in self._allowed:
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
        """Raise ConfigurationError for options that the client does not take; the registry is not
        asked.
        """
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
        """Return the text of a schema, or None where no schema is asked for."""
        url = self._settings.url
        question = {
            "url": url,
            "options": dict(self._settings.options),
            "schema_id": schema_id,
            "timeout_s": DEADLINE_S,
            "max_bytes": MAX_BYTES,
        }
        match _helper().ask(question):
            case {"text": text, "references": references}:
                return self_contained(text, references)
            case {"status": status} if status == _NOT_FOUND and schema_id is not None:
                raise UnknownWriterSchemaError(url, schema_id)
            case answer if (error := _failure(url, answer)) is not None:
                raise error
        return None


def _failure(url: str, answer: Mapping[str, Any] | None) -> Exception | None:
    """Return the error that an answer reports; None where it reports none."""
    match answer:
        case None:
            return RegistryUnreachableError(url, f"no whole answer within {DEADLINE_S:.0f} s")
        case {"missing": name}:
            error = ImportError(f"No module named {name!r}", name=name)
            return missing_package(error) or error
        case {"options": reason}:
            return _refused_options(reason)
        case {"status": status} if status in _REFUSALS:
            return RegistryAccessError(url, f"HTTP status {status}")
        case {"status": status}:
            return RegistryUnreachableError(url, f"HTTP status {status}")
        case {"tls": _}:
            return RegistryAccessError(url, "TLS")
        case {"too_large": _}:
            return RegistryUnreachableError(url, "its answer is too large")
        case {"trouble": name}:
            return RegistryUnreachableError(url, str(name))
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
    """A process that asks registries, one question at a time; it is started for the first one, and
    anew after it was ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._quiet: dict[str, tuple[float, dict[str, Any] | None]] = {}
        """Registries that have not answered, or with too much, by URL: until when they are not
        asked again (monotonic), and the last answer.
        """

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer; None where there is none before the deadline."""
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
                started = self._say(self._process, import_paths, _START_S)
                if started != {}:
                    return started
            answer = self._say(self._process, question, DEADLINE_S)
            if answer is None or "too_large" in answer:
                self._process.kill()
                self._process.wait()
                self._quiet[question["url"]] = time.monotonic() + QUIET_S, answer
            return answer

    @staticmethod
    def _say(process: subprocess.Popen[str], line: Any, limit_s: float) -> dict[str, Any] | None:
        """Write this line to the process and return its next one; None where the process has ended,
        also by this limit.
        """
        reader = cast(IO[str], process.stdin)
        answers = cast(IO[str], process.stdout)
        end = threading.Timer(limit_s, process.kill)
        end.daemon = True
        end.start()
        try:
            reader.write(json.dumps(line) + "\n")
            reader.flush()
            reply = answers.readline()
            return dict(json.loads(reply)) if reply.endswith("\n") else None
        except OSError:
            return None
        finally:
            end.cancel()


_START_S: Final = 60.0
_helpers: dict[int, _Helper] = {}
"""The helper of each process, by its id: a helper does not survive a fork."""


def _helper() -> _Helper:
    return _helpers.setdefault(os.getpid(), _Helper())
