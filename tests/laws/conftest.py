"""Every law holds on every engine and, where they differ, every kind of lake; a test's id names
both, as in `spark-catalog`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.cases import Case
from tests.support.configurations import settings_for
from tests.support.lakes import CaseLake, OpenSpark, engine_for, place_of
from watersmeet.core.model import PartitionMerge
from watersmeet.settings import Settings

QUICK = "embedded-folder"
"""Where a step costs little: the layers are written once, so here is the place for many steps. With
Spark, a law has few."""

SPARK_FOLDER, SPARK_CATALOG = (
    pytest.param(kind, marks=pytest.mark.long) for kind in ("spark-folder", "spark-catalog")
)
FOLDER_AT_NIGHT, CATALOG_AT_NIGHT = (
    pytest.param(kind, marks=pytest.mark.nightly) for kind in ("spark-folder", "spark-catalog")
)
"""The layers are written once, and reach Spark through the engine alone. `make test` tries the
engine on Spark (test_engine.py), `make test-long` how it names, merges and erases in a catalog and,
in a folder, the laws of silver and gold and those that Spark alone has ever broken; each night does
the rest.
"""

in_folders = pytest.mark.parametrize(
    "kind", [QUICK, FOLDER_AT_NIGHT], indirect=True, scope="module"
)
"""For a law in which a catalog differs by the names of its tables alone, which the other laws and
tests/integration try."""

in_folders_of_both = pytest.mark.parametrize(
    "kind", [QUICK, SPARK_FOLDER], indirect=True, scope="module"
)
"""For one that depends on how Spark itself writes, deletes and reads files."""

ON_BOTH_ENGINES = [QUICK, "spark-folder", CATALOG_AT_NIGHT]
"""For the laws of the engines themselves, which `make test` tries with Spark, too."""

in_catalogs_of_spark = pytest.mark.parametrize(
    "kind", [QUICK, "spark-folder", SPARK_CATALOG], indirect=True, scope="module"
)
"""For those of the laws of the engines themselves that a catalog, which has its own names of
tables, could break."""

IN_FOLDERS_OF_BOTH = [QUICK, SPARK_FOLDER, CATALOG_AT_NIGHT]
"""For the laws that the promises of each kind of lake rest on."""

MakeSettings = Callable[..., Settings]
MakeLake = Callable[..., CaseLake]


def one_of(kinds: Sequence[Any]) -> Any:
    """The fixture `kind`, for laws that are tried on each of these; a module may have one of its
    own."""

    @pytest.fixture(scope="module", params=kinds)
    def kind(request: pytest.FixtureRequest) -> str:
        return str(request.param)

    return kind


kind = one_of([QUICK, FOLDER_AT_NIGHT, CATALOG_AT_NIGHT])


@pytest.fixture(scope="module")
def new_settings(
    kind: str, open_spark: OpenSpark, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeSettings]:
    """Makes configurations, each for a lake of its own; the overrides are those of
    `settings_for`."""
    with ExitStack() as places:

        def make(**overrides: Any) -> Settings:
            folder = tmp_path_factory.mktemp("laws")
            place = places.enter_context(place_of(kind, open_spark, folder))
            return settings_for(folder, **place, **overrides)

        yield make


@pytest.fixture(scope="module")
def new_lake(open_spark: OpenSpark, new_settings: MakeSettings) -> MakeLake:
    """Makes lakes of cases, with all tables and nothing in them."""

    def make(cases: Mapping[int, Case], **overrides: Any) -> CaseLake:
        settings = new_settings(**overrides)
        return CaseLake(engine_for(open_spark, settings), settings, dict(cases))

    return make


def models(cases: Mapping[int, Case]) -> list[PartitionMerge]:
    return [case.merged() for case in cases.values()]
