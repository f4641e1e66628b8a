"""What a process of Watersmeet imports."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import importlib.util, sys
from watersmeet.imports import hide_pandas
hide_pandas()
import pyarrow as pa
import watersmeet.run
assert "pandas" not in sys.modules
assert importlib.util.find_spec("pandas") is not None
try:
    import pandas
except ModuleNotFoundError as error:
    assert error.name == "pandas"
else:
    raise AssertionError("pandas is not hidden")
import pyspark
assert pa.table({"a": [1]}).to_pandas()["a"].tolist() == [1]
"""

INTERRUPTED = """
import runpy, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # also below a process that ignores it
sys.meta_path.insert(0, Interrupting())
runpy.run_module("watersmeet", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["watersmeet.cli", "typer", "rich.console"])
def test_ctrl_c_ends_a_command_silently_while_its_modules_are_imported(module: str) -> None:
    program = INTERRUPTED.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    killed = -signal.SIGINT, 128 + signal.SIGINT  # a shell tells no difference
    assert done.returncode in killed
    assert (done.stdout, done.stderr) == ("", "")


def test_pandas_is_imported_only_where_something_needs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
