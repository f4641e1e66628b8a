"""The user's expressions, `publish.valid` and `publish.value`: DuckDB's SQL on every engine.

A process of their own evaluates them (`expressions.process`), within limits of memory and time, and
may end without harm to a run. What an expression makes of a record is that record's alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.errors import ConfigurationError, WorkerEndedError
from watersmeet.expressions.protocol import COUNTED, MEMORY_BYTES, ROW_S, read, write

PREDICATE: Final = ("BOOLEAN",)
"""Types of `publish.valid`, as DuckDB names them."""

MESSAGE: Final = ("VARCHAR", "BLOB", "JSON")
"""Types of `publish.value`."""

_MOST_ROWS: Final = 8_192
"""Rows of a request: with more, DuckDB may reorder conditions by the time that each took."""

_REQUEST_BYTES: Final = 16 * 1024**2
"""Size of the rows of a request, unless one row is larger."""

_KILLS: Final = 3
"""Number of processes, one after the other, that somebody else may end at the same row."""

# The program of the process: it says in a line why it cannot serve, else nothing, then answers.
_START: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
try:
    from watersmeet.expressions.process import connect, serve
    connection = connect()
except Exception as error:
    print(error)
    sys.exit(1)
print(flush=True)
serve(connection)
"""

_ENVIRONMENT: Final = {
    "LC_ALL": "C",
    "TZ": "UTC",
    # Allocators that reserve addresses would leave few of the limit.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
}

Answer: TypeAlias = tuple[dict[str, Any], pa.Table]


class Outcome(NamedTuple):
    """What an expression makes of some rows.

    `values`: null where it is null, or failed; `failed`: where it failed; `error`: why, for the
    first of these rows, without anything that may be a value of a record.
    """

    values: pa.ChunkedArray
    failed: pa.ChunkedArray
    error: str | None


def expression_problem(text: str, columns: pa.Schema, kinds: tuple[str, ...]) -> str | None:
    """Return what is wrong with an expression over these columns that must give one of `kinds`."""
    problem, _ = _evaluator().check(text, columns, kinds)
    return None if problem is None else f"`{' '.join(text.split())}` {problem}"


def evaluate(text: str, rows: pa.Table, kinds: tuple[str, ...]) -> Outcome:
    """Return what an expression that gives one of `kinds` makes of each row.

    Raises ConfigurationError for one that does not pass the gate, even from a lake's epochs.
    """
    return _evaluator().evaluate(text, rows, kinds)


class _Evaluator:
    """The process of this process: started with the first expression, and again after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._was_fresh = True
        """True where the last request was the first one of its process."""
        self._checked: dict[object, tuple[str | None, list[str]]] = {}

    def check(
        self, text: str, columns: pa.Schema, kinds: tuple[str, ...]
    ) -> tuple[str | None, list[str]]:
        key = text, columns.serialize().to_pybytes(), kinds
        with self._lock:
            if key not in self._checked:
                request = {"text": text, "kinds": kinds}
                facts, _ = self._alone(request, columns.empty_table())
                self._checked[key] = facts["problem"], facts["columns"]
            return self._checked[key]

    def evaluate(self, text: str, rows: pa.Table, kinds: tuple[str, ...]) -> Outcome:
        problem, columns = self.check(text, rows.schema, kinds)
        if problem is not None:
            raise ConfigurationError(
                f"an expression is not evaluated: `{' '.join(text.split())}` {problem}",
                fix="write one that passes `watersmeet validate`, and record it with "
                "`watersmeet evolve --apply`",
            )
        count = len(rows)
        if not columns:  # the same of every row
            columns, rows = rows.column_names[:1], rows[:1]
        rows = _read(rows, columns)
        request = {"text": text}
        found = []
        error = None
        begin, size = 0, _MOST_ROWS
        while begin < rows.num_rows:
            some = rows.slice(begin, size)
            while len(some) > 1 and some.nbytes > _REQUEST_BYTES:
                some = some.slice(0, len(some) // 2)
            with self._lock:
                answer = self._alone(request, some) if len(some) == 1 else self._ask(request, some)
                if isinstance(answer, int) or not answer[0]["answer"]:
                    size = len(some) // 2
                    continue
                if error is None and (row := pc.index(answer[1]["failed"], True).as_py()) >= 0:
                    error = self._alone(request, some.slice(row, 1))[0]["error"]
            found.append(answer[1])
            begin += len(some)
            size = min(_MOST_ROWS, 2 * size)
        kind = pa.bool_() if kinds == PREDICATE else pa.large_binary()
        schema = pa.schema([("value", kind), ("failed", pa.bool_())])
        made = pa.concat_tables([schema.empty_table(), *(each.cast(schema) for each in found)])
        if len(rows) != count:
            made = made.take(pa.repeat(pa.scalar(0, pa.int8()), count))
        return Outcome(made["value"], made["failed"], error)

    def _alone(self, request: dict[str, Any], row: pa.Table) -> Answer:
        # The process may lack memory for it because of what it has done before: so its failure
        # counts in a process that has done nothing else.
        killed = 0
        while isinstance(answer := self._ask(request, row), int):
            is_killed = answer == -signal.SIGKILL  # by the kernel, or by a person
            killed += is_killed
            if killed == _KILLS:
                raise WorkerEndedError("evaluated publish.valid or publish.value")
            if answer == -signal.SIGPROF:
                return _failed(f"it took more than {ROW_S:g} s of processor time")
            if self._was_fresh and not is_killed:
                return _failed(f"it took more than {MEMORY_BYTES // 1024**3} GiB of memory")
        return answer

    def _ask(self, request: dict[str, Any], rows: pa.Table) -> Answer | int:
        self._was_fresh = self._process is None
        process = self._process = self._process or _started()
        try:
            write(cast(BinaryIO, process.stdin), request, rows)
            answer = read(cast(BinaryIO, process.stdout))
        except BrokenPipeError:
            answer = None
        if answer is not None:
            return answer
        self._process = None
        with suppress(BrokenPipeError):  # of what was not sent
            cast(BinaryIO, process.stdin).close()
        with process:  # closes its other pipe, and waits for its end
            return process.wait()


def _read(rows: pa.Table, columns: list[str]) -> pa.Table:
    read = {}
    for column in columns:
        name = column.removeprefix(COUNTED)
        read[name] = rows[name]
        if name != column and pa.types.is_list(read[name].type):
            chunks = [*map(_zeros, read[name].chunks)]
            read[name] = pa.chunked_array(chunks, pa.list_(pa.int8()))
    return pa.table(read)


def _zeros(lists: pa.ListArray) -> pa.ListArray:
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    ends = pc.cumulative_sum(lengths)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    values = pa.array(np.zeros(offsets[-1].as_py(), np.int8))
    return pa.ListArray.from_arrays(offsets, values, mask=lists.is_null())


def _failed(error: str) -> Answer:
    head = {"answer": True, "error": error, "problem": f"cannot be planned: {error}", "columns": []}
    return head, pa.table({"value": pa.nulls(1), "failed": [True]})


def _started() -> subprocess.Popen[bytes]:
    # It knows this one's modules, and no secrets of it.
    paths = json.dumps([str(Path(path).resolve()) for path in sys.path if path])
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START, paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        start_new_session=True,  # a signal that asks a run to stop is none for it
    )
    greeting = cast(BinaryIO, process.stdout).readline().decode(errors="replace")
    if greeting != "\n":
        with process:
            process.kill()
        raise ConfigurationError(
            "the process that evaluates publish.valid and publish.value cannot start: "
            f"{greeting.strip() or f'it ended with status {process.returncode}'}",
            fix="install Watersmeet with its packages there (docs/install.md)",
        )
    return process


_evaluators: dict[int, _Evaluator] = {}


def _evaluator() -> _Evaluator:
    return _evaluators.setdefault(os.getpid(), _Evaluator())
