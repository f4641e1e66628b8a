"""Small files beside the tables, such as renewals of leases, on a local disk or in an object store, opened as delta-rs would."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from pyarrow import fs

from pipelines.errors import ConfigurationError
from pipelines.lake.location import local_path, scheme_of

_S3: Final = {
    "ACCESS_KEY_ID": "access_key",
    "SECRET_ACCESS_KEY": "secret_key",
    "SESSION_TOKEN": "session_token",
    "DEFAULT_REGION": "region",
    "REGION": "region",
    "ENDPOINT": "endpoint_override",
    "ENDPOINT_URL": "endpoint_override",
    "ENDPOINT_URL_S3": "endpoint_override",
    "VIRTUAL_HOSTED_STYLE_REQUEST": "force_virtual_addressing",
}
_AZURE: Final = {
    name: name.lower() for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN", "CLIENT_ID", "CLIENT_SECRET", "TENANT_ID")
}
"""delta-rs's options, without the store's prefix, and the arguments of pyarrow that mean the same; a later name comes first."""


class Files:
    """Reads, writes and deletes small files by path or URI.

    `storage` holds options of the object store under delta-rs's names; what it does not say, the environment does. An address
    whose file system cannot be opened without Spark (`dbfs:`, `hdfs:`) raises ConfigurationError.
    """

    def __init__(self, storage: Mapping[str, str]) -> None:
        self._storage = storage
        self._systems: dict[tuple[str | None, str], fs.FileSystem] = {}

    def read_text(self, address: str) -> str | None:
        """What a file holds (perhaps nothing yet while it is being written); None where there is none."""
        system, path = self._open(address)
        try:
            with system.open_input_stream(path) as stream:
                return bytes(stream.read()).decode(errors="replace")
        except FileNotFoundError:
            return None

    def write_text(self, address: str, text: str) -> None:
        """Writes a file anew, with the folders that lead to it."""
        system, path = self._open(address)
        if scheme_of(address) is None:  # an object store has no folders
            system.create_dir(path.rpartition("/")[0], recursive=True)
        with system.open_output_stream(path) as stream:
            stream.write(text.encode())

    def exists(self, address: str) -> bool:
        """Whether there is a file or folder of that name."""
        system, path = self._open(address)
        return bool(system.get_file_info(path).type != fs.FileType.NotFound)

    def delete(self, address: str) -> None:
        """Afterwards there is neither file nor folder of that name, nor anything in it."""
        system, path = self._open(address)
        with suppress(FileNotFoundError):
            is_folder = system.get_file_info(path).type == fs.FileType.Directory
            (system.delete_dir if is_folder else system.delete_file)(path)

    def _open(self, address: str) -> tuple[fs.FileSystem, str]:
        scheme = scheme_of(address)
        if scheme is None:
            where, path = "", local_path(address)
        else:
            parts = urlsplit(address, allow_fragments=False)
            where, path = parts.netloc, f"{parts.netloc.partition('@')[0]}{parts.path}"
        if (scheme, where) not in self._systems:
            self._systems[scheme, where] = self._system(scheme, where, address)
        return self._systems[scheme, where], path

    def _system(self, scheme: str | None, where: str, address: str) -> fs.FileSystem:
        if scheme is None:
            return fs.LocalFileSystem()
        if scheme in ("s3", "s3a"):
            return fs.S3FileSystem(**s3_arguments(self._storage))
        if scheme in ("abfs", "abfss"):
            account = where.partition("@")[2].partition(".")[0]
            return fs.AzureFileSystem(**{"account_name": account, **_arguments("AZURE_STORAGE_", _AZURE, self._storage)})
        if scheme == "gs":
            return fs.GcsFileSystem()
        raise ConfigurationError(
            f"`{address}`: files of `{scheme}:` cannot be opened without Spark; "
            "give `checkpoints` as a folder, or as a URI with s3:, abfss: or gs:"
        )


def s3_arguments(storage: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of pyarrow's S3FileSystem for delta-rs's options."""
    found: dict[str, Any] = _arguments("AWS_", _S3, storage)
    if found.get("endpoint_override", "").startswith("http://"):
        found["scheme"] = "http"
    if "force_virtual_addressing" in found:
        found["force_virtual_addressing"] = found["force_virtual_addressing"] == "true"
    return found


def _arguments(prefix: str, names: Mapping[str, str], storage: Mapping[str, str]) -> dict[str, str]:
    """Options are named in any case, with or without the prefix; what they do not say, the environment does."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    given = {name.upper().removeprefix(prefix): value for name, value in {**environment, **storage}.items() if value}
    return {argument: given[name] for name, argument in names.items() if name in given}
