"""What indexers and draft stages are trained to do, against plain sums in float64."""

from __future__ import annotations

import math

import pytest
import torch

from training.draft_model import Drafts, draft_loss
from training.index_loss import attention_mass, index_divergence
from training.window_attention import Attended, mark_window

WINDOW, PIECES, HEADS, ENTRIES = 4, 2, 3, 5
SAMPLED = torch.tensor([3, 0])


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_mass_of_an_entry_is_its_share_of_one_softmax_over_rows_entries_and_sink() -> None:
    attended = Attended(
        output=torch.empty(0),
        window_logits=random(1, PIECES, HEADS, WINDOW, 2 * WINDOW, seed=1),
        entry_logits=random(1, PIECES, HEADS, WINDOW, ENTRIES, seed=2),
    )
    is_seen = mark_window(PIECES, WINDOW, torch.device("cpu"))
    is_visible = random(PIECES, WINDOW, ENTRIES, seed=3) > 0
    sink = random(HEADS, seed=4)
    mass = attention_mass(attended, is_seen, is_visible, sink, SAMPLED)
    assert mass.shape == (1, PIECES, len(SAMPLED), ENTRIES)
    assert attended.entry_logits is not None
    for piece in range(PIECES):
        for place, query in enumerate(SAMPLED.tolist()):
            expected = [0.0] * ENTRIES
            for head in range(HEADS):
                rows = attended.window_logits[0, piece, head, query].double().exp()
                entries = attended.entry_logits[0, piece, head, query].double().exp()
                entries = entries * is_visible[piece, query]
                total = (rows * is_seen[piece, query]).sum() + entries.sum()
                total = total + sink[head].double().exp()
                for entry in range(ENTRIES):
                    expected[entry] += float(entries[entry] / total)
            assert mass[0, piece, place].tolist() == pytest.approx(expected, abs=1e-6)


def test_index_loss_is_the_divergence_of_scores_from_the_mass_that_may_be_chosen() -> None:
    scores = torch.tensor([[1.0, 2.0, 0.5], [3.0, 1.0, 9.0], [0.0, 0.0, 0.0]], requires_grad=True)
    mass = torch.tensor([[0.6, 0.2, 0.2], [0.3, 0.1, 7.0], [5.0, 5.0, 5.0]], requires_grad=True)
    may = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])

    def divergence(target: list[float], given: list[float]) -> float:
        total = sum(map(math.exp, given))
        return sum(
            p * math.log(p / (math.exp(s) / total)) for p, s in zip(target, given, strict=True)
        )

    expected = (
        divergence([0.6, 0.2, 0.2], [1.0, 2.0, 0.5]) + divergence([0.75, 0.25], [3.0, 1.0])
    ) / 2
    loss = index_divergence(scores, mass, may)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert mass.grad is None
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    # A row without a choice, and an entry that may not be chosen, teach nothing.
    assert scores.grad[2].tolist() == [0.0, 0.0, 0.0]
    assert scores.grad[1, 2] == 0


def test_draft_loss_is_the_papers() -> None:
    block, vocabulary = 3, 4
    logits = random(1, 2, block, vocabulary, seed=5)
    confidence = random(1, 2, block, seed=6).requires_grad_()
    target = random(1, 2, block, vocabulary, seed=7)
    came = torch.tensor([[[0, 1, 2], [3, 3, 0]]])
    loss = draft_loss(Drafts(logits, confidence, {}), target, came)
    weights = [math.exp(-k / 4) for k in range(block)]
    totals, variations = 0.0, 0.0
    for anchor in range(2):
        for k in range(block):
            q = torch.softmax(logits[0, anchor, k].double(), 0)
            p = torch.softmax(target[0, anchor, k].double(), 0)
            variation = 0.5 * float((q - p).abs().sum())
            c = confidence[0, anchor, k].double().sigmoid().item()
            entropy = -float(q[came[0, anchor, k]].log())
            judged = -(1 - variation) * math.log(c) - variation * math.log(1 - c)
            each = 0.1 * entropy + 0.9 * variation + judged
            totals += each * weights[k] / (sum(weights) / block)
            variations += variation
    assert loss.total.item() == pytest.approx(totals / (2 * block), rel=1e-5)
    assert float(loss.variation) == pytest.approx(variations / (2 * block), rel=1e-5)
