"""Large values are parsed one at a time, over threads and processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import orjson
import pyarrow as pa
import pytest

from tests.core.test_reading import FAR, kafka_table, rules
from watersmeet.core import items, values
from watersmeet.core.items import LARGE_BYTES, in_turn
from watersmeet.core.reading import read_records

pytestmark = pytest.mark.promise("R52")

ANOTHER = f"""
from watersmeet.core.items import in_turn
with in_turn({LARGE_BYTES + 1}):
    print("mine", flush=True)
    input()
"""


@pytest.mark.fault("kill")
def test_a_turn_is_one_workers_in_all_processes_and_ends_with_it() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", ANOTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout
    assert other.stdout.readline() == b"mine\n"
    has_begun = threading.Event()

    def take() -> None:
        with in_turn(LARGE_BYTES + 1):
            has_begun.set()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take)
        with in_turn(LARGE_BYTES):  # a small value waits for nobody
            assert not has_begun.wait(0.2)
        other.kill()
        waiting.result(30)


@pytest.mark.fault("hostile")
def test_what_fails_in_its_turn_fails_as_it_would_alone() -> None:
    with pytest.raises(OSError, match="disk"), in_turn(LARGE_BYTES + 1):
        raise OSError("disk")
    with in_turn(LARGE_BYTES + 1):
        pass


@pytest.mark.fault("memory")
def test_no_two_large_values_are_parsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsing = threading.Semaphore()
    loads = orjson.loads

    def alone(text: bytes) -> object:
        assert parsing.acquire(blocking=False)
        try:
            return loads(text)
        finally:
            parsing.release()

    monkeypatch.setattr(orjson, "loads", alone)
    value = b'{"ts":1,"n":{"k":7.0},"s":"' + b"x" * LARGE_BYTES + b'"}'
    how = rules(keys=((("n", "k"),),), id=("n", "k"))
    with ThreadPoolExecutor(4) as pool:
        reads = pool.map(lambda _: read_records(kafka_table([(None, value, FAR)]), how), range(8))
        assert {read["merge_key"][0].as_py() for read in reads} == {"7.0"}


def test_values_are_parsed_in_pieces_of_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    structs = values._structs

    def counted(texts: list[bytes | None], *more: object) -> pa.Array:
        pieces.append(sum(len(text or b"") for text in texts))
        return structs(texts, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(values, "_structs", counted)
    texts = [b'{"a":%d%s}' % (n, b" " * (n * 1_000)) for n in range(100)]
    texts[7] += b" " * 3 * LARGE_BYTES
    kind = pa.struct([("a", pa.int64())])
    typed = values.typed_values(pa.array([*texts, None], pa.binary()), kind)
    assert typed.to_pylist() == [*({"a": n} for n in range(100)), None]
    assert sum(pieces) == sum(map(len, texts))
    assert [size for size in pieces if size > items.LARGE_BYTES] == [len(texts[7])]
