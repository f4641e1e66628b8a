"""A secret of the configuration is nobody's but its owner's: no other user of the machine sees
it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SECRET = 'hunter2 "é\\=:#'
OPTION = "-Dkeystore.password=hunter2"

SESSION = """
import json, os, stat, sys, tempfile, threading
from pathlib import Path
import psutil
from watersmeet.engine.session import spark_session

secret, option, folder = sys.argv[1:]
tempfile.tempdir = folder
lines, modes, ended = set(), set(), threading.Event()

def watch():
    while not ended.wait(0.005):
        for process in psutil.Process().children(recursive=True):
            try:
                lines.add(" ".join(process.cmdline()))
            except psutil.Error:
                pass
        for file in Path(folder).rglob("*"):
            try:
                if b"hunter2" in file.read_bytes():
                    modes.add(oct(stat.S_IMODE(file.stat().st_mode)))
            except OSError:
                pass

watcher = threading.Thread(target=watch)
watcher.start()
settings = {
    "spark.hadoop.fs.s3a.secret.key": secret,
    "spark.driver.extraJavaOptions": option,
    "spark.driver.memory": "700m",
}
session = spark_session(settings)
ended.set()
watcher.join()
files = [file for file in Path(folder).rglob("*") if file.is_file()]
left = [str(file) for file in files if b"hunter2" in file.read_bytes()]
jvm = session.sparkContext._jvm
print(json.dumps({
    "lines": sorted(lines),
    "modes": sorted(modes),
    "left": left,
    "environment": "hunter2" in str(dict(os.environ)),
    "secret": session.sparkContext.getConf().get("spark.hadoop.fs.s3a.secret.key"),
    "option": jvm.java.lang.System.getProperty("keystore.password"),
    "zone": jvm.java.lang.System.getProperty("user.timezone"),
    "heap_mb": jvm.java.lang.Runtime.getRuntime().maxMemory() // 2**20,
    "default": session.conf.get("spark.of.the.defaults"),
}))
"""


@pytest.mark.promise("C20")
@pytest.mark.long
def test_what_stands_under_spark_is_in_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = tmp_path / "conf"
    defaults.mkdir()
    (defaults / "spark-defaults.conf").write_text(
        "spark.of.the.defaults yes\nspark.driver.memory 3g\n"
    )
    monkeypatch.setenv("SPARK_CONF_DIR", str(defaults))
    folder = tmp_path / "a folder"
    folder.mkdir()
    program = [sys.executable, "-c", SESSION, SECRET, OPTION, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "hunter2" not in "".join(found["lines"])
    assert any("org.apache.spark.deploy.SparkSubmit" in line for line in found["lines"])
    assert (found["modes"], found["left"], found["environment"]) == (["0o600"], [], False)
    assert (found["secret"], found["option"], found["zone"], found["default"]) == (
        SECRET,
        "hunter2",
        "UTC",
        "yes",
    )
    assert 500 < found["heap_mb"] <= 700
    assert "hunter2" not in done.stderr
