from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pipelines.adapters.spark import layer_session


@pytest.fixture
def spark(root_session: SparkSession) -> SparkSession:
    """With compiled queries, as in production."""
    session = layer_session(root_session)
    session.conf.set("spark.sql.codegen.wholeStage", "true")
    session.conf.set("spark.sql.codegen.factoryMode", "FALLBACK")
    return session
