"""Small files beside the tables, such as lease renewals, on a local disk or in an object store.

They are opened as delta-rs would open them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import ObjectStore, from_url

from watersmeet.errors import ConfigurationError, StoreAccessError, StoreUnreachableError
from watersmeet.lake.location import has_store, local_path, scheme_of

_PREFIXES: Final = ("aws_", "azure_", "google_")
_CLIENT: Final = frozenset(
    [
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "pool_idle_timeout",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "timeout",
        "user_agent",
    ]
)
"""Options of delta-rs that concern the connection, whatever the store."""

_COPIED_BYTES: Final = 1024 * 1024

_PATIENCE: Final[Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
"""Few retries: the caller waits for a store that is away.

A lease has to be renewed as soon as the store is back.
"""


class Files:
    """Access to small files by path or URI: reads, writes and deletes them.

    `storage` holds options of the object store under delta-rs's names; the environment supplies
    what is missing there.

    - An address whose file system cannot be opened without Spark (`dbfs:`, `hdfs:`) raises
      ConfigurationError.
    - An object store that does not answer raises StoreUnreachableError.
    - An object store that refuses raises StoreAccessError.
    """

    def __init__(self, storage: Mapping[str, str]) -> None:
        self._storage = storage
        self._stores: dict[tuple[str | None, str], ObjectStore] = {}

    def read_text(self, address: str) -> str | None:
        """Return the content of a file; None where there is no file.

        It may be empty while the file is being written.
        """
        if scheme_of(address) is None:
            with suppress(FileNotFoundError):
                return Path(local_path(address)).read_text(encoding="utf-8", errors="replace")
            return None
        with self._at(address, "reading") as (store, path), suppress(FileNotFoundError):
            return bytes(obstore.get(store, path).bytes()).decode(errors="replace")
        return None

    def write_text(self, address: str, text: str) -> None:
        """Write a file anew, and make the folders that lead to it."""
        self.put(BytesIO(text.encode()), address)

    def put(self, file: BinaryIO, address: str) -> None:
        """Copy what an opened file still has, of any size, to an address."""
        if scheme_of(address) is None:
            target = Path(local_path(address))
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with target.open("wb") as copy:
                    shutil.copyfileobj(file, copy, _COPIED_BYTES)
            except BaseException:
                target.unlink(missing_ok=True)  # a part of it
                raise
            return
        with self._at(address, "writing") as (store, name):
            obstore.put(store, name, file)

    def create(self, address: str) -> bool:
        """Make an empty file in an object store, and return True.

        Where the file exists, change nothing and return False. Where the store cannot tell, the
        file is written anew. Raises ConfigurationError where there is no such bucket.
        """
        with self._at(address, "writing") as (store, path):
            try:
                obstore.put(store, path, b"", mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            except FileNotFoundError:
                raise _no_bucket(address) from None
            except NotImplementedError:
                obstore.put(store, path, b"")
        return True

    def exists(self, address: str) -> bool:
        """Return True where a file or folder of that name exists."""
        if scheme_of(address) is None:
            return Path(local_path(address)).exists()
        return self.has_file(address) or bool(self._below(address))

    def has_file(self, address: str) -> bool:
        """Return True where a file of that name exists."""
        return self.size(address) is not None

    def size(self, address: str) -> int | None:
        """Return how many bytes a file has; None where no file of that name exists."""
        if scheme_of(address) is None:
            file = Path(local_path(address))
            return file.stat().st_size if file.is_file() else None
        with self._at(address, "listing") as (store, path), suppress(FileNotFoundError):
            return obstore.head(store, path)["size"]
        return None

    def delete(self, address: str) -> None:
        """Delete the file or folder of that name, with everything in it, if it exists."""
        if scheme_of(address) is None:
            path = Path(local_path(address))
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            return
        below = self._below(address)
        with self._at(address, "deleting") as (store, name), suppress(FileNotFoundError):
            obstore.delete(store, [*below, name])

    def delete_files(self, folder: str, names: Sequence[str]) -> None:
        """Delete files below a folder; those that are gone already are skipped.

        On a local disk, the checksums that Hadoop keeps beside its files go, too.
        """
        if scheme_of(folder) is None:
            for path in (Path(local_path(folder), name) for name in names):
                path.unlink(missing_ok=True)
                path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        elif names:
            with self._at(folder, "deleting") as (store, below), suppress(FileNotFoundError):
                obstore.delete(store, [f"{below}/{name}" for name in names])

    def delete_beginning(self, folder: str, prefix: str) -> None:
        """Delete all files below a folder whose names begin so."""
        if scheme_of(folder) is None:
            for path in Path(local_path(folder)).rglob(f"{prefix}*"):
                path.unlink(missing_ok=True)
            return
        below = [path for path in self._below(folder) if path.rpartition("/")[2].startswith(prefix)]
        if below:
            with self._at(folder, "deleting") as (store, _), suppress(FileNotFoundError):
                obstore.delete(store, below)

    def check_readable(self, address: str) -> None:
        """Raise WatersmeetError where a store does not answer, refuses, or lacks the bucket."""
        self.read_text(f"{address}/_none")  # a list does not tell a refusal from an outage
        try:
            with self._at(address, "listing") as (store, path):
                next(iter(obstore.list(store, path, chunk_size=1)), None)
        except StoreUnreachableError:
            raise _no_bucket(address) from None

    def _below(self, address: str) -> list[str]:
        with self._at(address, "listing") as (store, path):
            return [entry["path"] for entries in obstore.list(store, path) for entry in entries]

    @contextmanager
    def _at(self, address: str, doing: str) -> Iterator[tuple[ObjectStore, str]]:
        """Yield the store and the path of an address. Inside, errors of the store become ours."""
        try:
            yield self._open(address)
        except (PermissionDeniedError, UnauthenticatedError):
            raise StoreAccessError(
                f"the object store refuses {doing} at {address.rpartition('/')[0]}: the "
                "credentials are wrong, or lack the permission",
                fix="correct them in `storage` or the environment",
            ) from None
        except (AlreadyExistsError, UnknownConfigurationKeyError):
            raise
        except BaseError:
            raise StoreUnreachableError(
                f"the object store of {address.rpartition('/')[0]} does not answer",
                fix="start it, or correct its endpoint in `storage`",
            ) from None

    def _open(self, address: str) -> tuple[ObjectStore, str]:
        if not has_store(address):
            raise ConfigurationError(
                f"`{address}`: files of `{scheme_of(address)}:` cannot be opened without Spark",
                fix="give `checkpoints` as a folder, or as a URI with s3:, abfss: or gs:",
            )
        scheme = scheme_of(address)
        parts = urlsplit(address, allow_fragments=False)
        if (scheme, parts.netloc) not in self._stores:
            self._stores[scheme, parts.netloc] = _store(f"{scheme}://{parts.netloc}", self._storage)
        return self._stores[scheme, parts.netloc], unquote(parts.path.lstrip("/"))


def _no_bucket(address: str) -> ConfigurationError:
    return ConfigurationError(
        f"there is no bucket or container `{urlsplit(address).netloc}` at "
        f"{address.partition('/_')[0]}, or it may not be listed",
        fix="create it, or correct the address",
    )


def _store(url: str, storage: Mapping[str, str]) -> ObjectStore:
    """Open a store with delta-rs's options.

    Option names may be in any case, with or without the store's prefix. Options that only delta-rs
    knows are left out.
    """
    config: Any = {
        name: value
        for name, value in storage.items()
        if not _client_options({name: value}) and _is_known(url, {name: value})
    }
    environment = {
        name: value for name, value in os.environ.items() if name.lower().startswith(_PREFIXES)
    }
    client: Any = _client_options(environment) | _client_options(storage)
    store: ObjectStore = from_url(url, config=config, client_options=client, retry_config=_PATIENCE)
    return store


def _client_options(options: Mapping[str, str]) -> dict[str, str]:
    unprefixed = {
        re.sub(f"^({'|'.join(_PREFIXES)})", "", name.lower()): value
        for name, value in options.items()
    }
    return {name: value for name, value in unprefixed.items() if name in _CLIENT}


def _is_known(url: str, config: Any) -> bool:
    try:
        from_url(url, config=config)
    except UnknownConfigurationKeyError:
        return False
    except BaseError:  # half of a pair, such as a key without its secret
        return True
    return True
