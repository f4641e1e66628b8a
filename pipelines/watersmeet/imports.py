"""Limits what a process imports, and what that costs it later."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Final

_NEED_PANDAS: Final = frozenset({"pyspark", "great_expectations"})
"""The packages whose import says that this process needs pandas."""


class _Hidden(MetaPathFinder, Loader):
    """Finder of modules by which pandas cannot be imported before a package that needs it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # None for all else; a spec that cannot be imported where pandas is installed.
        if name != "pandas" or not _NEED_PANDAS.isdisjoint(sys.modules):
            return None
        is_installed = PathFinder.find_spec(name, path, target) is not None
        return spec_from_loader(name, self) if is_installed else None

    def exec_module(self, module: ModuleType) -> None:
        raise ModuleNotFoundError(f"No module named {module.__name__!r}", name=module.__name__)


@cache
def hide_pandas() -> None:
    """Keep pyarrow from importing pandas in this process, unless something else needs pandas.

    It does so for the first array, if only to see that it was given none of pandas': a third of a
    second at every start. It tries again when it makes a pandas frame.
    """
    sys.meta_path.insert(0, _Hidden())


@cache
def leave_imports_alone() -> None:
    """Keep Python from looking for garbage among all that this process has imported.

    Thousands of new messages make it look again and again: half of the time that reading took.
    """
    gc.freeze()
