"""The rules of the lake, with which a repartitioned source must be read by the same rules."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from watersmeet.lake.choice import reader
from watersmeet.lake.epochs import check_repartition_rules, read_epochs
from watersmeet.lake.lease import EVOLVE, check_not_changing
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings


class LakeRules:
    """The rules that the lake has for one source."""

    def __init__(self, settings: Settings, source: str) -> None:
        self._settings = settings
        self._source = source
        self._lake = Lake(settings)

    def check(self) -> None:
        """Raise ConfigurationError if the lake has other rules for the source.

        Raises LeaseTakenError while the lake gets other rules.
        """
        check_not_changing(self._reader, self._lake, EVOLVE)
        epochs = read_epochs(self._reader, self._settings)
        check_repartition_rules(epochs, self._settings, self._source)

    @cached_property
    def _reader(self) -> TableReader:
        def spark() -> Any:
            """Return the session that reads a catalog's tables."""
            from watersmeet.engine.session import spark_session

            return spark_session(self._settings.spark)

        return reader(self._lake, spark)
