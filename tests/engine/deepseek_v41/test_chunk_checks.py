"""A pass that a caller asks for wrongly ends before it has written or hidden anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.models.deepseek_v41.draft import Drafter
from engine.models.deepseek_v41.engram import Engram
from engine.models.deepseek_v41.rows import Chunk, ImageRows
from engine.models.deepseek_v41.state import SequenceState
from kernels.operations import REFERENCE

from .model_bench import ModelBench, nano_bench

TOKENS = 6
IS_IMAGE = torch.tensor([False, True, True, False, False, False])


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    return nano_bench()


def chunk(state: SequenceState, ids: list[int], **more: object) -> Chunk:
    return Chunk(state=state, token_ids=ids, **more)  # type: ignore[arg-type]


def with_image(state: SequenceState, is_image: torch.Tensor, *shape: int) -> Chunk:
    image = ImageRows(is_image_T=is_image, embeddings=torch.zeros(shape) if shape else None)
    return chunk(state, [5] * TOKENS, image=image)


WRONG: dict[str, Callable[[SequenceState], list[Chunk]]] = {
    "no sequence": lambda state: [],
    "no token": lambda state: [chunk(state, [])],
    "token below 0": lambda state: [chunk(state, [5, -1, 5])],
    "token beyond the vocabulary": lambda state: [chunk(state, [5, 384])],
    "a sequence twice": lambda state: [chunk(state, [5]), chunk(state, [6])],
    "more than the blocks hold": lambda state: [chunk(state, [5] * 129)],
    "entries from within a group": lambda state: [chunk(state, [5, 6], entries_first=1)],
    "image rows by number": lambda state: [with_image(state, IS_IMAGE.long())],
    "image rows of other tokens": lambda state: [with_image(state, IS_IMAGE[1:])],
    "one embedding for two rows": lambda state: [with_image(state, IS_IMAGE, 1, 64)],
    "an embedding of another size": lambda state: [with_image(state, IS_IMAGE, 2, 1)],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_pass_is_refused_and_nothing_has_changed(
    bench: ModelBench, wrong: Callable[[SequenceState], list[Chunk]]
) -> None:
    state = bench.begin(128)
    before = bench.blocks.memory.clone(), bench.states.memory.clone()
    with pytest.raises(AssertionError):
        bench.model.forward(wrong(state))
    assert torch.equal(bench.blocks.memory, before[0])
    assert torch.equal(bench.states.memory, before[1])
    assert (state.length, state.marks().length_reached) == (0, 0)
    bench.end(state)


def test_right_image_is_taken(bench: ModelBench) -> None:
    """The measure of the checks above."""
    config = bench.model.config
    assert (config.vocabulary, config.hidden) == (384, 64)
    state = bench.begin(128)
    bench.model.forward([with_image(state, IS_IMAGE, 2, 64)])
    assert state.length == TOKENS
    bench.end(state)


@pytest.mark.parametrize("token_id", [-1, 384])
def test_draft_after_a_token_that_does_not_exist_is_refused(
    bench: ModelBench, token_id: int
) -> None:
    state = bench.begin(128)
    bench.run(state, [5, 6])
    with pytest.raises(AssertionError):
        Drafter(bench.model).draft(state, token_id)
    bench.end(state)


@pytest.mark.parametrize("number", [-1, 10**6])
def test_compressed_id_outside_the_compressed_vocabulary_is_refused(
    bench: ModelBench, number: int
) -> None:
    ids = torch.arange(384) % 300
    ids[7] = number
    with pytest.raises(AssertionError):
        Engram(bench.model.config, REFERENCE, ids, torch.device("cpu"))
