"""A step runs every answer, and of prompts in their order what its budget pays for."""

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.cost import PrefillCost
from engine.scheduler.step_plan import Chunk, Prefill, StepPlan, plan_step

A_SECOND_A_TOKEN = PrefillCost(a0_s=0.0, a1_s=1.0, a2_s=0.0, a3_s=0.0)


def plan(
    *prefills: Prefill,
    budget_s: float,
    answers: tuple[int, ...] = (),
    arriving: Prefill | None = None,
    cost: PrefillCost = A_SECOND_A_TOKEN,
) -> StepPlan:
    return plan_step(answers, prefills, arriving, cost=cost, budget_s=budget_s)


def test_step_without_requests_has_no_pass() -> None:
    assert plan(budget_s=1.0) == StepPlan(passes=(), alone_ends=())


def test_answers_have_a_pass_whatever_the_budget() -> None:
    assert plan(budget_s=0.0, answers=(5, 6)) == StepPlan(passes=((),), alone_ends=())


def test_prompts_share_the_first_pass_as_far_as_the_budget_reaches() -> None:
    found = plan(Prefill(0, 100), Prefill(0, 300), Prefill(0, 50), budget_s=300.0, answers=(9,))
    # 299 are left beside the answer: 100, and of 199 one block. Nobody passes the second.
    assert found.passes == ((Chunk(0, 100), Chunk(1, 128)),)


def test_first_prompt_gets_a_block_when_nothing_is_left() -> None:
    found = plan(Prefill(0, 300), Prefill(0, 10), budget_s=3.0, answers=(1,) * 20)
    assert found.passes == ((Chunk(0, 128),),)


def test_prompt_that_stops_at_borders_goes_on_in_further_passes() -> None:
    found = plan(Prefill(128, 400, (256, 384)), Prefill(0, 5), budget_s=1000.0)
    assert found.passes == ((Chunk(0, 256), Chunk(1, 5)), (Chunk(0, 384),), (Chunk(0, 400),))


def test_further_passes_are_paid_for() -> None:
    cost = PrefillCost(a0_s=100.0, a1_s=1.0, a2_s=0.0, a3_s=0.0)
    prefill = Prefill(0, 300, (128, 256))
    assert plan(prefill, budget_s=355.0, cost=cost).passes == ((Chunk(0, 128),),)
    found = plan(prefill, budget_s=456.0, cost=cost)
    assert found.passes == ((Chunk(0, 128),), (Chunk(0, 256),))


def test_answers_are_charged_with_what_they_look_back_at() -> None:
    cost = PrefillCost(a0_s=10.0, a1_s=1.0, a2_s=0.5, a3_s=0.25)
    # 10 + 2 (1 + 0.25) + 0.5 (100 + 60) = 92.5, and 128 more tokens cost 128 + 0.25 * 128^2 = 4224.
    room_s = 92.5 + 4224.0
    answers = (100, 60)
    two = (Prefill(0, 1), Prefill(0, 128))
    assert len(plan(*two, budget_s=room_s + 1.25, answers=answers, cost=cost).passes[0]) == 2
    assert len(plan(*two, budget_s=room_s + 1.24, answers=answers, cost=cost).passes[0]) == 1


ONE_BY_ONE = PrefillCost(a0_s=10.0, a1_s=1.0, a2_s=0.0, a3_s=0.0, a4_s=7.0)
"""Each further sequence of a pass costs 7."""


def test_each_further_answer_is_charged_for_being_in_the_pass() -> None:
    # 10 + 16 + 15 * 7 = 131 for the answers, 7 + 256 for a chunk of two blocks beside them.
    prefill, answers = Prefill(0, 256), (100,) * 16
    found = plan(prefill, budget_s=394.0, answers=answers, cost=ONE_BY_ONE)
    assert found.passes == ((Chunk(0, 256),),)
    found = plan(prefill, budget_s=393.9, answers=answers, cost=ONE_BY_ONE)
    assert found.passes == ((Chunk(0, 128),),)


def test_each_further_prompt_is_charged_for_being_in_the_pass() -> None:
    # 10 + 100 for the first, 7 + 200 for the second.
    prompts = (Prefill(0, 100), Prefill(0, 200))
    found = plan(*prompts, budget_s=317.0, cost=ONE_BY_ONE)
    assert found.passes == ((Chunk(0, 100), Chunk(1, 200)),)
    found = plan(*prompts, budget_s=316.9, cost=ONE_BY_ONE)
    assert found.passes == ((Chunk(0, 100), Chunk(1, 128)),)


def test_arriving_prompt_has_passes_of_its_own_behind_the_others() -> None:
    arriving = Prefill(128, 300, (256,))
    found = plan(Prefill(0, 10), budget_s=1000.0, answers=(7,), arriving=arriving)
    assert found == StepPlan(passes=((Chunk(0, 10),),), alone_ends=(256, 300))
    assert plan(Prefill(0, 300), budget_s=200.0, arriving=arriving).alone_ends == ()
    assert plan(budget_s=0.0, answers=(7,), arriving=arriving).alone_ends == (256,)


prefills = st.builds(
    lambda blocks, more, marks: Prefill(
        128 * blocks,
        128 * blocks + more,
        tuple(sorted({128 * mark for mark in marks} | {128 * blocks + more // 2 // 128 * 128})),
    ),
    st.integers(0, 6),
    st.integers(1, 900),
    st.sets(st.integers(0, 12), max_size=3),
)
costs = st.builds(
    PrefillCost,
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([1e-4, 1e-3]),
    st.sampled_from([0.0, 1e-7]),
    st.sampled_from([0.0, 5e-8]),
    st.sampled_from([0.0, 0.03]),
)


@given(
    st.lists(st.integers(0, 2000), max_size=5),
    st.lists(prefills, max_size=4),
    st.none() | prefills,
    costs,
    st.floats(0.0, 2.0),
)
def test_plan_keeps_its_rules(
    answers: list[int],
    ready: list[Prefill],
    arriving: Prefill | None,
    cost: PrefillCost,
    budget_s: float,
) -> None:
    found = plan_step(answers, ready, arriving, cost=cost, budget_s=budget_s)
    spent_s = 0.0
    position = [prefill.computed_tokens for prefill in ready]
    for number, chunks in enumerate(found.passes):
        assert chunks or (number == 0 and answers)
        sequences = len(chunks) + (len(answers) if number == 0 else 0)
        spent_s += (sequences - 1) * cost.a4_s
        indexes = [chunk.index for chunk in chunks]
        assert indexes == sorted(set(indexes))
        spent_s += cost.a0_s
        for chunk in chunks:
            prefill, first = ready[chunk.index], position[chunk.index]
            assert first < chunk.end <= prefill.known_tokens
            assert chunk.end % 128 == 0 or chunk.end == prefill.known_tokens
            assert not any(first < border < chunk.end for border in prefill.borders)
            spent_s += cost.added_s(chunk.end - first, first)
            position[chunk.index] = chunk.end
    # In order: whoever has something left has nobody served behind it.
    is_complete = [at == p.known_tokens for at, p in zip(position, ready, strict=True)]
    is_touched = [at > p.computed_tokens for at, p in zip(position, ready, strict=True)]
    if False in is_complete:
        assert not any(is_touched[is_complete.index(False) + 1 :])
        assert not found.alone_ends
    if ready:
        assert is_touched[0]
    if arriving is not None and not ready:
        assert found.alone_ends
    spent_s += sum(cost.added_s(1, tokens) for tokens in answers)
    is_more_than_the_least = sum(len(chunks) for chunks in found.passes) > 1
    if is_more_than_the_least and not found.alone_ends:
        assert spent_s <= budget_s + 1e-9
