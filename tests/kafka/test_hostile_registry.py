"""A registry that answers slowly, without end, with too much or in circles costs neither time nor
memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.avro import as_text, framed
from tests.support.hostile_registry import answering, flood, packed_flood, schema, send
from tests.support.repeating import repeating
from tests.support.timing import within
from watersmeet.configuration.sources import RegistrySettings
from watersmeet.core.avro_schema import EXCESS, avro_schema
from watersmeet.core.json_text import UndecodableError
from watersmeet.errors import RegistryUnreachableError, UnknownWriterSchemaError
from watersmeet.kafka import registry as asking
from watersmeet.kafka.registry import Registry

pytestmark = [pytest.mark.promise("K60"), pytest.mark.fault("outage", "hostile")]
READER: dict[str, Any] = {"type": "record", "name": "R", "fields": [{"name": "f", "type": "long"}]}
TYPES = b'["AVRO"]'
MEMORY_BYTES = 150 * 2**20
"""How much more memory this process and its children may have than before."""


class Answers:
    """What a server has been asked, and how it answers."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.answer, self.asked, self.is_over = answer, 0, threading.Event()


@contextmanager
def serving(answers: Answers) -> Iterator[Registry]:
    def answer(to: BaseHTTPRequestHandler) -> None:
        answers.asked += 1
        answers.answer(to)

    with answering(answer, answers.is_over) as url:
        yield Registry(RegistrySettings(url=url))


def memory() -> int:
    """The resident memory of this process and of all below it, as far as they are still there when
    they are asked."""
    me, total = psutil.Process(), 0
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


@contextmanager
def watched_memory() -> Iterator[None]:
    before, most = memory(), [0]

    def look() -> None:
        most[0] = max(most[0], memory())

    with repeating(look, 0.02):
        yield
    assert most[0] - before < 256 * 2**20 + MEMORY_BYTES


def test_an_answer_that_never_ends_is_given_up_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking, "DEADLINE_S", 3.0)

    def trickle(to: BaseHTTPRequestHandler) -> None:
        to.send_response(200)
        to.end_headers()
        while not answers.is_over.wait(0.1):
            to.wfile.write(b" ")

    answers = Answers(trickle)
    with serving(answers) as registry:
        with pytest.raises(RegistryUnreachableError, match="no whole answer within 3 s"):
            registry.check()
        with within(1, "it is not asked again for a while: a stop waits for one answer alone"):
            for _ in range(5):
                with pytest.raises(RegistryUnreachableError, match="no whole answer within 3 s"):
                    _ = registry[1]
        assert answers.asked == 1
        later = time.monotonic() + asking.QUIET_S
        monkeypatch.setattr(time, "monotonic", lambda: later)
        with pytest.raises(RegistryUnreachableError, match="no whole answer within 3 s"):
            _ = registry[1]
        assert answers.asked == 2, "another process is started, and given up as well"


@pytest.mark.long
@pytest.mark.parametrize("is_packed", [True, False])
def test_an_answer_of_any_size_is_not_taken_into_memory(is_packed: bool) -> None:
    too_large = pytest.raises(RegistryUnreachableError, match="its answer is too large")
    with (
        serving(Answers(packed_flood() if is_packed else flood)) as registry,
        watched_memory(),
        too_large,
    ):
        _ = registry[1]


@pytest.mark.parametrize("name", ["circle", "endless", "itself"])
def test_references_without_an_end_are_the_records_fate(name: str) -> None:
    main = {"type": "record", "name": "R", "fields": [{"name": "f", "type": "T0"}]}

    def lead_on(to: BaseHTTPRequestHandler) -> None:
        if "/ids/" in to.path:
            return send(to, schema(main, "T0"))
        number = int(to.path.split("/")[2][1:])
        after = {"circle": (number + 1) % 3, "endless": number + 1, "itself": number}[name]
        kind = {
            "type": "record",
            "name": f"T{number}",
            "fields": [{"name": "f", "type": f"T{after}"}],
        }
        return send(to, schema(kind, f"T{after}"))

    answers = Answers(lead_on)
    with serving(answers) as registry:
        decode = avro_schema(as_text(READER), Path("x.avsc"), registry).decoder()
        for _ in range(2):
            with pytest.raises(
                UndecodableError, match="the schema that it was written with is no Avro schema"
            ):
                decode(framed(1, b"\x02"))
    assert answers.asked <= 101, "and nothing is asked for twice"


ELSEWHERE = {"name": "T", "subject": "t", "version": 1}


@pytest.mark.promise("C62")
@pytest.mark.parametrize(
    "answer",
    [
        "<html>",
        '{"schema": "{',
        "[]",
        "{}",
        '{"error_code": 50001, "message": "not now"}',
        *(json.dumps({"schema": text}) for text in (None, "", " ", 7, READER)),
        json.dumps({"schema": as_text(READER).decode(), "references": [{}]}),
    ],
)
@pytest.mark.parametrize("is_reference", [False, True])
def test_an_answer_that_no_registry_gives_is_waited_out(answer: str, is_reference: bool) -> None:
    refers = {**READER, "fields": [{"name": "f", "type": "T"}]}
    whole = {"schema": json.dumps(refers), "references": [ELSEWHERE]}
    kind = {**READER, "name": "T"}

    def lie(to: BaseHTTPRequestHandler) -> None:
        is_asked = is_reference == to.path.startswith("/subjects")
        send(to, answer.encode() if is_asked else json.dumps(whole).encode())

    def tell(to: BaseHTTPRequestHandler) -> None:
        is_asked = is_reference == to.path.startswith("/subjects")
        send(to, schema(kind) if is_asked else json.dumps(whole).encode())

    answers = Answers(lie)
    with serving(answers) as registry:
        decode = avro_schema(as_text(READER), Path("x.avsc"), registry).decoder()
        for _ in range(2):
            with pytest.raises(RegistryUnreachableError, match="does not answer at http"):
                decode(framed(1, b"\x02"))
        answers.answer = tell
        with suppress(RegistryUnreachableError):  # what its client keeps is forgotten
            _ = registry[1]
        assert json.loads(registry[1])["fields"][0]["name"] == "f"


@pytest.mark.promise("C62")
def test_a_server_that_is_no_registry_does_not_say_that_a_schema_is_unknown() -> None:
    """Else records would be refused once `unknown_after` is over: a proxy may answer so while the
    registry is away, and another path of its server at any time."""
    answers = Answers(lambda to: send(to, b"<html>no such page</html>", 404))
    with serving(answers) as registry:
        for ask in (registry.check, lambda: registry[1]):
            with pytest.raises(RegistryUnreachableError, match=r"\(HTTP status 404\)"):
                ask()
        answers.answer = lambda to: send(to, b"{}", 404 if "/ids/" in to.path else 200)
        for ask in (registry.check, lambda: registry[1]):
            with pytest.raises(RegistryUnreachableError, match="is not one of a schema registry"):
                ask()


def test_half_a_character_in_a_schema_is_kept_as_a_whole_one() -> None:
    halved = json.dumps({"schema": as_text({**READER, "doc": "x"}).decode().replace("x", "\ud800")})
    with serving(Answers(lambda to: send(to, halved.encode()))) as registry:
        assert json.loads(registry[1].encode()) == {**READER, "doc": "?"}


def test_a_schema_that_is_too_large_is_the_records_fate() -> None:
    with serving(Answers(lambda to: send(to, schema({**READER, "doc": "x" * 2**21})))) as registry:
        with pytest.raises(UndecodableError, match="has more than 1,048,576 bytes"):
            avro_schema(as_text(READER), Path("x.avsc"), registry).decoder()(framed(1, b"\x02"))
        assert len(registry[1]) == 2**20 + 1, "and the lake keeps no more of it"


@pytest.mark.nightly
@pytest.mark.long
def test_any_number_of_large_schemas_takes_little_memory() -> None:
    fields = [{"name": f"a{n}", "type": "int"} for n in range(30_000)]

    def answer(to: BaseHTTPRequestHandler) -> None:
        own = {"name": to.path.partition("?")[0].rpartition("/")[2].join("bb"), "type": "int"}
        send(to, schema({**READER, "fields": [*READER["fields"], own, *fields]}))

    with serving(Answers(answer)) as registry, watched_memory():
        decode = avro_schema(as_text(READER), Path("x.avsc"), registry).decoder()
        for schema_id in range(60):
            assert decode(framed(schema_id, bytes(30_002))) == {"f": 0}


def test_a_source_that_takes_no_further_schemas_asks_for_none() -> None:
    answers = Answers(lambda to: send(to, schema(READER)))
    with serving(answers) as registry:
        full = Registry(registry._settings, kept={1: as_text(READER).decode()}, is_full=True)
        assert [json.loads(full[1]), full[2], full[3]] == [READER, EXCESS, EXCESS]
        assert answers.asked == 0
        few = Registry(registry._settings, most=2)
        assert [few[n] == EXCESS for n in (1, 2, 3, 2, 4)] == [False, False, True, False, True]
        decode = avro_schema(as_text(READER), Path("x.avsc"), full).decoder()
        with pytest.raises(UndecodableError, match="has 1,000 schemas, or 16 MiB of them, and"):
            decode(framed(2, b"\x02"))


def test_a_registry_that_answers_is_asked_by_one_process_that_ends_with_this_one() -> None:
    def answer(to: BaseHTTPRequestHandler) -> None:
        if to.path.endswith("/ids/4711"):
            return send(to, b'{"error_code": 40403, "message": "no"}', 404)
        return send(to, TYPES if to.path.endswith("/types") else schema(READER))

    with serving(Answers(answer)) as registry:
        assert json.loads(registry[1]) == READER
        with pytest.raises(UnknownWriterSchemaError, match="schema 4711"):
            _ = registry[4711]
        assert json.loads(registry[2]) == READER
