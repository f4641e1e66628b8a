"""Small files beside the tables, wherever they are: through the file system that Spark itself uses for the address."""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession


class Files:
    """Reads, writes and deletes files by path or URI."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def local_path(self, path: str) -> str | None:
        """Where this machine has it; None where another file system does (a bare path is one of Spark's default system)."""
        where = self._system(self._path(path)).makeQualified(self._path(path)).toUri()
        return str(where.getPath()) if where.getScheme() == "file" else None

    def read_text(self, path: str) -> str | None:
        """What a file holds (nothing while it is being written), None where there is none."""
        where = self._path(path)
        system = self._system(where)
        try:
            if not system.exists(where):
                return None
            stream = system.open(where)
            try:
                return bytes(stream.readAllBytes()).decode(errors="replace")
            finally:
                stream.close()
        except Py4JJavaError as error:
            if "FileNotFoundException" in str(error.java_exception.getClass().getName()):
                return None
            return ""

    def write_text(self, path: str, text: str) -> None:
        """Writes a file anew, with the folders that lead to it."""
        where = self._path(path)
        stream = self._system(where).create(where, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()

    def delete(self, path: str) -> None:
        """Afterwards there is neither file nor folder of that name."""
        where = self._path(path)
        self._system(where).delete(where, True)

    def _path(self, path: str) -> Any:
        jvm: Any = self._spark._jvm
        return jvm.org.apache.hadoop.fs.Path(path)

    def _system(self, where: Any) -> Any:
        configuration = self._spark._jsparkSession.sessionState().newHadoopConf()
        return where.getFileSystem(configuration)
