"""Judged drafts: what is accepted is what greedy decoding would have said, and nothing is left."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.models.deepseek_v41.draft import Drafter
from tests.engine.deepseek_v41.model_bench import ModelBench, nano_bench
from training.draft_judge import DraftJudge, choose_places
from training.draft_scores import JudgedDraft, format_drafts, sum_up

TOKENS = 150


def prompt(bench: ModelBench, tokens: int = TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(8)
    return torch.randint(
        3, bench.model.config.vocabulary - 2, (tokens,), generator=generator
    ).tolist()


def greedy_tokens(bench: ModelBench, before: list[int], count: int) -> list[int]:
    """What the model says after `before`, one token at a time."""
    state = bench.begin(len(before) + count)
    said = [int(bench.run(state, before)[-1].argmax())]
    while len(said) < count:
        said.append(int(bench.run(state, said[-1:])[-1].argmax()))
    bench.end(state)
    return said[:count]


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    return nano_bench()


@pytest.mark.parametrize("right", [0, 2, 5])
def test_guesses_are_accepted_up_to_the_first_that_greedy_decoding_would_not_say(
    bench: ModelBench, monkeypatch: pytest.MonkeyPatch, right: int
) -> None:
    given = prompt(bench)
    said = greedy_tokens(bench, given, 5)
    guesses = said[:right]
    if right < 5:
        # What comes after the wrong guess is right again, but nobody would ever ask for it.
        guesses = [*guesses, (said[right] + 1) % bench.model.config.vocabulary]
        guesses += greedy_tokens(bench, given + guesses, 4 - right)
    state = bench.begin(TOKENS + 5)
    bench.run(state, given[:-1])
    draft = Drafter(bench.model).draft(state, given[-1])
    scripted = replace(draft, token_ids=torch.tensor(guesses))
    monkeypatch.setattr(Drafter, "draft", lambda *_: scripted)
    assert DraftJudge(bench.model).judge(state, given[-1]).accepted == right
    bench.end(state)


def test_confidence_and_overlap_are_those_of_each_guess(bench: ModelBench) -> None:
    *before, token_id = prompt(bench)
    state = bench.begin(TOKENS + 5)
    bench.run(state, before)
    judged = DraftJudge(bench.model).judge(state, token_id)
    draft = Drafter(bench.model).draft(state, token_id)
    assert judged.confidence == pytest.approx((1 / (1 + (-draft.confidence).exp())).tolist())
    given = [token_id, *draft.token_ids.tolist()]
    for index in range(5):
        target = torch.softmax(bench.run(state, given[index : index + 1])[-1].double(), dim=0)
        guess = torch.softmax(draft.logits[index].double(), dim=0)
        variation = 0.5 * float((target - guess).abs().sum())
        assert judged.overlap[index] == pytest.approx(1 - variation, abs=1e-5)
    bench.end(state)


def test_judging_leaves_the_sequence_as_it_was(bench: ModelBench) -> None:
    *before, token_id = prompt(bench)
    expected = bench.run(bench.begin(TOKENS), [*before, token_id])[-1]
    state = bench.begin(TOKENS + 5)
    bench.run(state, before)
    judge = DraftJudge(bench.model)
    first = judge.judge(state, token_id)
    assert judge.judge(state, token_id) == first
    assert state.length == len(before)
    assert torch.equal(bench.run(state, [token_id])[-1], expected)


def test_places_are_spread_over_the_document() -> None:
    assert choose_places(100, 3) == [25, 50, 75]
    assert choose_places(3, 16) == [1, 2]
    assert choose_places(1, 4) == []
    assert choose_places(2_048, 0) == []
    assert len(choose_places(2_048, 16)) == 16


def judged(accepted: int, confidence: Sequence[float]) -> JudgedDraft:
    return JudgedDraft(accepted=accepted, confidence=confidence, overlap=[0.5] * len(confidence))


def test_shares_are_over_drafts_that_reached_a_guess() -> None:
    score = sum_up([judged(0, [0.2, 0.9]), judged(1, [0.4, 0.8]), judged(1, [0.6, 0.4])])
    first, second = score.guesses
    assert score.drafts == 3
    assert score.accepted_mean == pytest.approx(2 / 3)
    assert (first.reached, first.accepted) == (3, 2)
    assert (second.reached, second.accepted) == (2, 0)
    assert (first.share_of_drafts, first.share_of_reached) == (2 / 3, 2 / 3)
    assert (second.share_of_drafts, second.share_of_reached) == (0.0, 0.0)
    assert first.confidence_mean == pytest.approx(0.4)
    assert second.confidence_mean == pytest.approx(0.6)
    assert second.overlap_mean == 0.5


def test_guess_that_was_never_reached_has_no_shares() -> None:
    score = sum_up([judged(0, [0.2, 0.9])])
    assert score.guesses[1].share_of_reached is None
    assert score.guesses[1].confidence_mean is None
    heading, columns, first, second = format_drafts(score)
    assert heading == "1 drafts, 0.00 of 2 guesses accepted by greedy choice"
    assert columns.split()[:2] == ["guess", "reached"]
    assert first.split() == ["1", "1", "0", "0.000", "0.000", "0.200", "0.500"]
    assert second.split() == ["2", "0", "0", "0.000", "-", "-", "-"]
