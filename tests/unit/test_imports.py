"""What a process of Watersmeet imports."""

from __future__ import annotations

import subprocess
import sys

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


def test_pandas_is_imported_only_where_something_needs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
