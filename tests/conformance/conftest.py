"""The backends that every test in this folder runs against."""

from collections.abc import Callable

import pytest

from indexer.core.index import BlockIndex
from indexer.memory_index import MemoryIndex


@pytest.fixture(scope="session", params=[pytest.param(MemoryIndex, id="memory")])
def make_index(request: pytest.FixtureRequest) -> Callable[[], BlockIndex]:
    """A new, empty index at each call. Add a backend by adding a parameter."""
    make: Callable[[], BlockIndex] = request.param
    return make


@pytest.fixture
def index(make_index: Callable[[], BlockIndex]) -> BlockIndex:
    """An empty index."""
    return make_index()
