"""What these tests hold is let go after them."""

from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import modules


@pytest.fixture(scope="module", autouse=True)
def let_go_of_syntax_trees() -> Iterator[None]:
    """They are most of the objects of the process: all later searches for garbage would go through
    them, which takes longer than to parse anew."""
    yield
    modules.cache_clear()
