"""A real S3 server for the tests of this folder, and rivers whose lake is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.rivers import EMBEDDED, River
from tests.support.stores import BUCKET, Store, s3_store

MakeRiver = Callable[..., River]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with s3_store(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture
def on_s3(kafka: str, store: Store, tmp_path: Path) -> MakeRiver:
    """Makes a river whose lake is in the bucket; no option of the store comes from the
    environment."""

    def make(name: str, *, lake: str = EMBEDDED, partitions: int = 2) -> River:
        # A broker is shared.
        river = River.make(kafka, tmp_path, f"s3-{name}", lake=lake, partitions=partitions)
        river.config |= {"lake": f"s3://{BUCKET}/lakes/{name}", "storage": store.storage()}
        river.write()
        return river

    return make
