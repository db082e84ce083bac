"""Keys of prompts that resemble earlier ones: always those of the namespace, and hashed once."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import BlockLayout, Namespace, Section
from kvstore.client.prompt_keys import PromptKeys
from kvstore.errors import InvalidArgument
from kvstore.key import ImageSpan, TokenIds

BLOCK = 128


def make_namespace(tenant: str = "default") -> Namespace:
    layout = BlockLayout(sections=(Section("all", 1024),))
    return Namespace(model="m", weights="w", tokenizer="t", layout=layout, tenant=tenant)


NAMESPACES = [make_namespace("a"), make_namespace("b")]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[ImageSpan]]:
    """Prompts out of few parts, so that they often begin alike, some with images."""
    parts = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300)), max_size=5))
    tokens = [kind * 1000 + place for kind, length in parts for place in range(length)]
    spans, position = [], 0
    for gap, length, content in draw(
        st.lists(st.tuples(st.integers(0, 200), st.integers(1, 300), st.integers(0, 1)), max_size=3)
    ):
        start = position + gap
        if start + length > len(tokens):
            break
        spans.append(ImageSpan(start=start, length=length, content_hash=bytes([content]) * 32))
        position = start + length
    return tokens, draw(st.permutations(spans))


@given(
    st.lists(st.tuples(st.sampled_from(NAMESPACES), prompts()), max_size=8),
    st.integers(1, 4),
    st.integers(200, 3000),
)
def test_prompt_keys_are_those_of_the_namespace_whatever_came_before(
    asked: list[tuple[Namespace, tuple[list[int], list[ImageSpan]]]],
    prompts_max: int,
    tokens_max: int,
) -> None:
    cache = PromptKeys(prompts_max=prompts_max, tokens_max=tokens_max)
    for namespace, (tokens, images) in asked:
        assert cache.block_keys(namespace, tokens, images) == namespace.block_keys(tokens, images)
        assert cache.prompts <= prompts_max
        assert cache.tokens <= tokens_max


def ask(cache: PromptKeys, tokens: TokenIds, images: Sequence[ImageSpan] = ()) -> int:
    """Blocks that were hashed for a prompt."""
    before = cache.blocks_hashed
    keys = cache.block_keys(NAMESPACES[0], tokens, images)
    assert keys == NAMESPACES[0].block_keys(tokens, images)
    return cache.blocks_hashed - before


def test_prompt_that_grew_is_hashed_from_where_it_grew() -> None:
    cache = PromptKeys()
    tokens = np.arange(10 * BLOCK + 5, dtype=np.int32)
    assert ask(cache, tokens[: 8 * BLOCK + 5]) == 8
    assert ask(cache, tokens) == 2
    assert ask(cache, tokens) == 0
    assert ask(cache, tokens[: 3 * BLOCK]) == 0
    assert cache.prompts == 1


def test_prompts_that_fork_share_the_blocks_before_the_fork() -> None:
    cache = PromptKeys()
    stem = list(range(6 * BLOCK))
    assert ask(cache, [*stem, *[1] * 4 * BLOCK]) == 10
    assert ask(cache, [*stem, *[2] * 4 * BLOCK]) == 4
    assert ask(cache, [*stem, *[1] * 5 * BLOCK]) == 1
    assert ask(cache, [*stem, *[2] * 5 * BLOCK]) == 1


def test_images_are_told_apart_and_one_that_reaches_over_a_border_is_hashed_whole() -> None:
    cache = PromptKeys()
    tokens = [7] * (6 * BLOCK)
    one, other = (
        ImageSpan(start=2 * BLOCK + 10, length=2 * BLOCK, content_hash=bytes([kind]) * 32)
        for kind in (1, 2)
    )
    assert ask(cache, tokens, [one]) == 6
    assert ask(cache, tokens, [other]) == 4
    assert ask(cache, tokens) == 4
    assert ask(cache, [*tokens, *[8] * BLOCK], [one]) == 1
    assert ask(cache, [*tokens[: 4 * BLOCK], *[8] * BLOCK], [one]) == 3


def test_wrong_tokens_and_images_are_refused_whatever_is_remembered() -> None:
    cache = PromptKeys()
    tokens = [7] * (4 * BLOCK)
    span = ImageSpan(start=0, length=2 * BLOCK, content_hash=bytes(32))
    ask(cache, tokens, [span])
    behind = ImageSpan(start=4 * BLOCK - 1, length=2, content_hash=bytes(32))
    within = ImageSpan(start=BLOCK, length=5, content_hash=bytes(32))
    wrong: list[tuple[list[int], list[ImageSpan]]] = [
        ([*tokens, -1], [span]),
        ([*tokens, 1 << 31], [span]),
        (tokens[:BLOCK], [span]),
        (tokens, [span, behind]),
        (tokens, [span, within]),
    ]
    for given_tokens, images in wrong:
        with pytest.raises(InvalidArgument):
            cache.block_keys(NAMESPACES[0], given_tokens, images)
    assert ask(cache, tokens, [span]) == 0


def test_oldest_prompts_are_forgotten_when_the_memory_is_full() -> None:
    cache = PromptKeys(prompts_max=100, tokens_max=10 * BLOCK)
    first, second, third = ([kind] * 4 * BLOCK for kind in range(3))
    assert [ask(cache, first), ask(cache, second), ask(cache, first)] == [4, 4, 0]
    assert ask(cache, third) == 4
    assert [ask(cache, first), ask(cache, second)] == [0, 4]


def test_prompt_longer_than_the_memory_is_hashed_and_not_kept() -> None:
    cache = PromptKeys(tokens_max=4 * BLOCK)
    assert ask(cache, [1] * 5 * BLOCK) == 5
    assert (cache.prompts, cache.tokens) == (0, 0)


def test_list_of_keys_is_the_callers_own() -> None:
    cache = PromptKeys()
    keys = cache.block_keys(NAMESPACES[0], [1] * 2 * BLOCK)
    keys.clear()
    assert ask(cache, [1] * 2 * BLOCK) == 0
