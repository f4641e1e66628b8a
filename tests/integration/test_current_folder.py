"""What lies in the current folder is never run: not by the command, and not by the processes that
it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.rivers import EMBEDDED, FOLDER, Losses, River

pytestmark = [pytest.mark.promise("C34"), pytest.mark.long]


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 always looks into the current folder first"
)
@pytest.mark.parametrize(
    "lake", [EMBEDDED, pytest.param(FOLDER, id="spark", marks=pytest.mark.nightly)]
)
def test_no_process_of_a_run_imports_from_the_current_folder(
    lake: str, kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, f"current-folder-{lake}", lake=lake)
    river.program = (str(Path(sys.executable).with_name("watersmeet")),)
    for module in ("threading", "select", "pyarrow", "signal"):
        (river.folder / f"{module}.py").write_text(
            f"open({str(tmp_path / 'was-run')!r}, 'w')\nraise ImportError('{module}')\n"
        )
    river.flow()
    river.flow()
    river.finish()
    assert not (tmp_path / "was-run").exists()
    assert river.losses() == Losses()
