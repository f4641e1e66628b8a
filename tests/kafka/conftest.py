from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.secured import SecuredBroker, secured_broker
from watersmeet.settings import KafkaSettings


@pytest.fixture
def settings(kafka: str) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name for a topic of this test alone; the test creates it."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", request.node.name)[:200]


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    with secured_broker(tmp_path_factory.mktemp("secured"), "reader", "writer", "guest") as broker:
        yield broker
