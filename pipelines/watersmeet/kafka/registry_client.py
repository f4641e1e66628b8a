"""The process that asks a schema registry, by confluent-kafka's own client, and nothing else.

The client sets no bounds to an answer: it reads a body of any size, unpacks it, and waits as long
as a byte comes now and then. So the process has a limit of memory, and an alarm ends it after the
deadline. Questions and answers are lines of JSON; it ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import ssl
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

MEMORY_BYTES: Final = 256 * 2**20
"""Memory that an answer may take, unpacked and read, beyond what the process has when it begins."""

TOO_LARGE: Final = "its answer is too large"
_OTHER: Final = "its answer is not one of a schema registry"
_NOT_FOUND: Final = 404

MAX_REFERENCES: Final = 100
"""Maximum number of other schemas that a schema may refer to, directly and through others."""

_START_S: Final = 60
_clients: dict[str, Any] = {}


def main() -> None:
    """Answer the questions on standard input until that ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with its owner
        signal.signal(number, signal.SIG_IGN)
    # Whoever started us may have had it ignored, or held back.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.alarm(_START_S)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        import_module("confluent_kafka.schema_registry")  # takes a quarter of a second
    except ImportError as error:
        print(json.dumps({"missing": error.name}), file=answers, flush=True)
        return
    _limit_memory()
    print(json.dumps({}), file=answers, flush=True)
    signal.alarm(0)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, question["timeout_s"])
        answer = _answer(**question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


class OptionsError(Exception):
    """Options that the client does not take, and why; None: a file cannot be read."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


def client_of(url: str, options: dict[str, str], timeout_s: float) -> Any:
    """Return the client of a registry; nothing is asked. Raises OptionsError."""
    from confluent_kafka.schema_registry import SchemaRegistryClient

    # The run itself waits, and reports that it does.
    own = {"url": url, "timeout": timeout_s, "max.retries": 0}
    try:
        return SchemaRegistryClient({**options, **own})
    except (ValueError, TypeError) as error:  # they name options, never their values
        raise OptionsError(str(error)) from None
    except OSError:
        raise OptionsError(None) from None


def _answer(
    url: str, options: dict[str, str], timeout_s: float, schema_id: int | None, max_bytes: int
) -> dict[str, Any]:
    # A schema's `text` and `references`, or that it is `unknown`; or an HTTP `status`, what is
    # wrong with the `options`, `tls` or another `trouble`; nothing where no schema was asked for.
    from confluent_kafka.schema_registry import SchemaRegistryError

    name = json.dumps([url, options])
    try:
        client = _clients[name] = _clients.get(name) or client_of(url, options, timeout_s)
        if schema_id is None:
            _check(client)
            return {}
        try:
            return _schema(client, schema_id, max_bytes)
        except SchemaRegistryError as error:
            if error.http_status_code != _NOT_FOUND:
                raise
        _check(client)  # a proxy does not have the schema either, nor has another path of a server
        return {"unknown": schema_id}
    except OptionsError as error:
        return {"options": error.reason}
    except SchemaRegistryError as error:
        return {"status": error.http_status_code}
    except _OtherAnswerError:
        del _clients[name]  # it keeps what it was answered
        return {"trouble": _OTHER}
    except Exception as error:  # of the HTTP library, which depends on the client's version
        if _is_caused_by(error, MemoryError):
            return {"trouble": TOO_LARGE}
        if _is_caused_by(error, ssl.SSLError):
            return {"tls": True}
        return {"trouble": type(error).__name__}


class _OtherAnswerError(Exception):
    """An answer that no registry gives, though a server may in its place."""


class _EndlessError(Exception):
    """References have no end, or are too many."""


def _check(client: Any) -> None:
    if not isinstance(client.get_schema_types(), list):
        raise _OtherAnswerError


def _text(schema: Any) -> str:
    text = schema.schema_str
    if not isinstance(text, str) or not text.strip():
        raise _OtherAnswerError
    return text.encode(errors="replace").decode()  # a table takes no half of a character


def _schema(client: Any, schema_id: int, max_bytes: int) -> dict[str, Any]:
    # A longer text than a schema may be is cut off just behind that length, and references that are
    # endless, too many or too large are left out: of both, records cannot be read.
    schema = client.get_schema(schema_id)
    references: dict[tuple[str, int], str] = {}
    try:
        _collect(client, schema.references or [], references, ())
    except _EndlessError:
        references = {}
    if sum(map(len, references.values())) > max_bytes:
        references = {}
    return {"text": _text(schema)[: max_bytes + 1], "references": [*references.values()]}


def _collect(
    client: Any,
    references: list[Any],
    texts: dict[tuple[str, int], str],
    inside: tuple[tuple[str, int], ...],
) -> None:
    # Each after what it refers to. Raises _EndlessError where they have no end, or are too many.
    for reference in references:
        version = (reference.subject, reference.version)
        if not isinstance(version[0], str) or not isinstance(version[1], int):
            raise _OtherAnswerError
        if version in inside or len(texts) + len(inside) >= MAX_REFERENCES:
            raise _EndlessError
        if version not in texts:
            schema = client.get_version(*version, deleted=True).schema
            _collect(client, schema.references or [], texts, (*inside, version))
            texts[version] = _text(schema)


def _is_caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    return error is not None and (
        isinstance(error, kind) or _is_caused_by(error.__cause__ or error.__context__, kind)
    )


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
