"""A start of Spark's JVM that is interrupted leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.rivers import until
from watersmeet.cli import _ended_by_signals

STARTING = """
from watersmeet.cli import _ended_by_signals
from watersmeet.engine.session import spark_session
with _ended_by_signals():
    spark_session({})
"""
NEVER_READY = f"""#!{sys.executable}
import time
time.sleep(600)
"""


@pytest.mark.promise("N16")
@pytest.mark.fault("kill")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_jvm_that_is_not_ready_yet(number: signal.Signals, tmp_path: Path) -> None:
    """It would stay for ever, since it cannot tell its port to a Python that is gone."""
    command = tmp_path / "bin" / "spark-submit"
    command.parent.mkdir()
    command.write_text(NEVER_READY)
    command.chmod(0o700)
    starting = subprocess.Popen(
        [sys.executable, "-c", STARTING],
        env={**os.environ, "SPARK_HOME": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    of_start = psutil.Process(starting.pid)
    children: list[psutil.Process] = []
    try:
        until(lambda: bool(of_start.children()), "the JVM is being started")
        children = of_start.children()
        starting.send_signal(number)
        _, errors = starting.communicate(timeout=60)
        assert (starting.returncode, errors) == (0, b"")
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
    finally:
        starting.kill()
        for process in children:
            with suppress(psutil.NoSuchProcess):
                process.kill()


IGNORED = """
import os, signal, subprocess, time
from watersmeet.cli import _ended_by_signals
with _ended_by_signals():
    os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.{number}))
    # With a function for the child, as pyspark starts its JVM, the process forks.
    subprocess.run(["true"], preexec_fn=lambda: None)
    time.sleep(600)
"""


@pytest.mark.promise("N16")
@pytest.mark.fault("kill")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_though_it_comes_where_python_ignores_exceptions(
    number: signal.Signals,
) -> None:
    """In a hook of a fork, for instance, of which a start has several."""
    ended = subprocess.run(
        [sys.executable, "-c", IGNORED.format(number=number.name)],
        stderr=subprocess.PIPE,
        timeout=30,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.promise("N16")
@pytest.mark.fault("kill")
def test_sparks_handler_of_ctrl_c_ends_a_start_like_our_own() -> None:
    with pytest.raises(SystemExit) as ended, _ended_by_signals():
        raise KeyboardInterrupt
    assert ended.value.code is None
