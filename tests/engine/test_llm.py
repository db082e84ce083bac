"""An engine answers the same whatever the store has, and takes from it all that it may."""

import logging
from random import Random

import pytest

from engine.chat import encode_follow_up
from engine.errors import BlockPoolExhausted, EngineClosed, InvalidRequest
from engine.generation import Generation
from engine.llm import LLM, LLMConfig
from engine.load import ComputeType
from engine.sampling import Sampling
from engine.save_receipt import SaveSummary
from tests.engine.conftest import OpenTiny
from tests.engine.memory_store import FailingStore, MemoryStore, ShortStore, StuckStore

BLOCK = 128
FLUSH_S = 20.0


def random_prompt(llm: LLM, rng: Random, count: int) -> list[int]:
    return [rng.randrange(3, llm.tokenizer.vocabulary) for _ in range(count)]


def ask(llm: LLM, prompt_ids: list[int], max_tokens: int = 5, **sampling: float) -> Generation:
    generation = llm.generate(
        prompt_ids,
        max_tokens=max_tokens,
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
    )
    assert llm.flush(FLUSH_S)
    llm.forget_blocks()
    return generation


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("prompt_tokens", "hit_tokens"),
    [(127, 0), (128, 0), (129, 128), (255, 128), (256, 128), (257, 256), (400, 384)],
)
def test_llm_answers_the_same_after_a_hit_and_leaves_one_token_to_compute(
    open_tiny: OpenTiny, rng: Random, compute: ComputeType, prompt_tokens: int, hit_tokens: int
) -> None:
    store = MemoryStore()
    first, second, alone = (open_tiny(kept, compute=compute) for kept in (store, store, None))
    prompt_ids = random_prompt(first, rng, prompt_tokens)
    cold = ask(first, prompt_ids, temperature=1.0, seed=4)
    hit = ask(second, prompt_ids, temperature=1.0, seed=4)
    without_store = ask(alone, prompt_ids, temperature=1.0, seed=4)
    assert (cold.hit_tokens, hit.hit_tokens, without_store.hit_tokens) == (0, hit_tokens, 0)
    # The store is not asked for a prompt of which nothing could be taken.
    assert hit.matched_tokens == (prompt_tokens // BLOCK * BLOCK if prompt_tokens > BLOCK else 0)
    assert cold.token_ids == hit.token_ids == without_store.token_ids
    assert without_store.receipt.summary() == SaveSummary()


def test_llm_saves_only_the_blocks_that_were_not_hit(open_tiny: OpenTiny, rng: Random) -> None:
    store = MemoryStore()
    llm = open_tiny(store)
    prompt_ids = random_prompt(llm, rng, 300)
    assert ask(llm, prompt_ids).receipt.summary() == SaveSummary(stored=2)
    longer = [*prompt_ids, *random_prompt(llm, rng, 300)]
    assert ask(llm, longer).receipt.summary() == SaveSummary(stored=2)
    assert ask(llm, longer).receipt.summary() == SaveSummary()
    # The last block of this prompt has to be computed again for its logits, and is known.
    assert ask(llm, longer[: 4 * BLOCK]).receipt.summary() == SaveSummary(known=1)


def test_prompt_that_the_pool_still_has_is_not_asked_of_the_store(
    open_tiny: OpenTiny, rng: Random
) -> None:
    store = MemoryStore()
    llm = open_tiny(store)
    prompt_ids = random_prompt(llm, rng, 300)
    cold = llm.generate(prompt_ids, max_tokens=5)
    assert llm.flush(FLUSH_S)
    store.calls.clear()
    again = llm.generate(prompt_ids, max_tokens=5)
    assert (again.hit_tokens, again.matched_tokens) == (256, 0)
    assert again.token_ids == cold.token_ids
    llm.forget_blocks()
    from_store = llm.generate(prompt_ids, max_tokens=5)
    assert (from_store.hit_tokens, from_store.matched_tokens) == (256, 256)
    assert from_store.token_ids == cold.token_ids
    assert store.calls == ["match", "fetch"]
    assert llm.pool.free_blocks == llm.pool.capacity_blocks


def test_follow_up_hits_the_blocks_of_the_answer(open_tiny: OpenTiny, rng: Random) -> None:
    store = MemoryStore()
    llm = open_tiny(store)
    first = ask(llm, random_prompt(llm, rng, 200), 200, temperature=1.0, seed=1)
    tokens = first.prompt_tokens + len(first.token_ids)
    assert len(first.token_ids) > 80, "the answer fills no block; choose another seed"
    follow_up = encode_follow_up(llm.tokenizer, first.prompt_ids, first.token_ids, "And then?")
    hit, cold = ask(llm, follow_up), ask(open_tiny(), follow_up)
    assert hit.hit_tokens == tokens // BLOCK * BLOCK > first.prompt_tokens
    assert hit.token_ids == cold.token_ids


def test_last_block_is_saved_when_the_answer_ends_on_its_border(
    open_tiny: OpenTiny, rng: Random
) -> None:
    store = MemoryStore()
    llm = open_tiny(store)
    prompt_ids = random_prompt(llm, rng, 250)
    answer = ask(llm, prompt_ids, 6)
    assert len(answer.token_ids) == 6
    assert answer.receipt.summary() == SaveSummary(stored=2)
    assert ask(llm, [*prompt_ids, *answer.token_ids, 5]).hit_tokens == 256


@pytest.mark.parametrize("delivered_blocks", [0, 1, 2])
def test_llm_computes_what_a_fetch_did_not_deliver(
    open_tiny: OpenTiny, rng: Random, delivered_blocks: int
) -> None:
    store = ShortStore(delivered_blocks)
    llm = open_tiny(store)
    prompt_ids = random_prompt(llm, rng, 400)
    cold = ask(llm, prompt_ids)
    hit = ask(llm, prompt_ids)
    assert (hit.matched_tokens, hit.hit_tokens) == (384, delivered_blocks * BLOCK)
    assert hit.rejected_shards == 3
    assert hit.token_ids == cold.token_ids
    assert hit.receipt.summary() == SaveSummary(known=3 - delivered_blocks)


@pytest.mark.parametrize(
    ("failing", "errors", "hit_tokens"),
    [(("match",), 2, 0), (("fetch",), 1, 0), (("save",), 2, 0), (("match", "save"), 4, 0)],
)
def test_llm_goes_on_without_a_store_that_fails(
    open_tiny: OpenTiny,
    rng: Random,
    caplog: pytest.LogCaptureFixture,
    failing: tuple[str, ...],
    errors: int,
    hit_tokens: int,
) -> None:
    llm = open_tiny(FailingStore(*failing))
    prompt_ids = random_prompt(llm, rng, 300)
    with caplog.at_level(logging.WARNING):
        answers = [ask(llm, prompt_ids) for _ in range(2)]
    assert [answer.hit_tokens for answer in answers] == [0, hit_tokens]
    assert answers[0].token_ids == answers[1].token_ids == ask(open_tiny(), prompt_ids).token_ids
    assert llm.store_faults.count == errors
    assert len(caplog.records) == 1
    if "save" in failing:
        assert answers[1].receipt.summary() == SaveSummary(failed=2)


def test_tenants_do_not_see_each_others_blocks(open_tiny: OpenTiny, rng: Random) -> None:
    store = MemoryStore()
    one, other = open_tiny(store, tenant="one"), open_tiny(store, tenant="other")
    prompt_ids = random_prompt(one, rng, 300)
    ask(one, prompt_ids)
    assert ask(other, prompt_ids).matched_tokens == 0
    assert ask(one, prompt_ids).hit_tokens == 256


def test_bfloat16_and_float32_engines_do_not_share_blocks(open_tiny: OpenTiny, rng: Random) -> None:
    store = MemoryStore()
    prompt_ids = random_prompt(open_tiny(), rng, 300)
    ask(open_tiny(store, compute="float32"), prompt_ids)
    assert ask(open_tiny(store, compute="bfloat16"), prompt_ids).matched_tokens == 0


def test_first_token_does_not_wait_for_a_save(open_tiny: OpenTiny, rng: Random) -> None:
    store = StuckStore()
    llm = open_tiny(store)
    generation = llm.generate(random_prompt(llm, rng, 300), max_tokens=50)
    assert store.entered.wait(FLUSH_S)
    assert generation.receipt.summary() == SaveSummary(pending=2)
    store.release.set()
    assert llm.close()
    assert generation.receipt.summary() == SaveSummary(stored=2)


def test_llm_takes_blocks_back_from_the_queue_when_the_pool_is_short(
    open_tiny: OpenTiny, rng: Random
) -> None:
    store = StuckStore()
    config = LLMConfig(pool_blocks=6, room_deadline_s=0.05)
    llm = open_tiny(store, config=config)
    first = llm.generate(random_prompt(llm, rng, 130), max_tokens=3)
    assert store.entered.wait(FLUSH_S)
    second = llm.generate(random_prompt(llm, rng, 300), max_tokens=3)
    third = llm.generate(random_prompt(llm, rng, 600), max_tokens=3)
    assert second.receipt.summary() == SaveSummary(dropped=2)
    store.release.set()
    assert llm.flush(FLUSH_S)
    assert first.receipt.summary() == SaveSummary(stored=1)
    assert third.receipt.summary() == SaveSummary(stored=4)
    assert llm.pool.free_blocks == 6


def test_request_does_not_wait_for_the_end_of_saves_that_hang(
    open_tiny: OpenTiny, rng: Random
) -> None:
    store = StuckStore()
    llm = open_tiny(store, config=LLMConfig(pool_blocks=6, room_deadline_s=0.05))
    llm.generate(random_prompt(llm, rng, 130), max_tokens=3)
    assert store.entered.wait(FLUSH_S)
    llm.generate(random_prompt(llm, rng, 300), max_tokens=3)
    answer = llm.generate(random_prompt(llm, rng, 600), max_tokens=3)
    assert len(answer.token_ids) == 3
    # One block is in the save that hangs: no request may have all six, and this is said. What else
    # waits to be saved is not given up for it, since that would not do.
    with pytest.raises(BlockPoolExhausted, match="asked for 6 blocks, 1 of 6 free"):
        llm.generate(random_prompt(llm, rng, 700), max_tokens=3)
    store.release.set()


def test_llm_refuses_a_request_larger_than_its_pool(open_tiny: OpenTiny, rng: Random) -> None:
    llm = open_tiny(MemoryStore(), config=LLMConfig(pool_blocks=2))
    with pytest.raises(
        InvalidRequest, match=r"prompt tokens and max_tokens: given 260 .*, expected at most 256"
    ):
        llm.generate(random_prompt(llm, rng, 250), max_tokens=10)
    assert len(ask(llm, random_prompt(llm, rng, 250)).token_ids) == 5


def test_text_comes_in_pieces_that_joined_are_the_answer(open_tiny: OpenTiny, rng: Random) -> None:
    llm = open_tiny()
    pieces: list[str] = []
    generation = llm.generate(
        random_prompt(llm, rng, 50),
        max_tokens=60,
        sampling=Sampling(temperature=1.5, seed=2),
        on_text=pieces.append,
    )
    assert len(pieces) > 5
    assert "".join(pieces) == generation.text == llm.tokenizer.decode(generation.token_ids)


def test_answer_ends_at_a_stop_token_which_is_not_in_the_text(
    open_tiny: OpenTiny, rng: Random
) -> None:
    llm = open_tiny()
    sampling = Sampling(temperature=2.0, seed=3)
    generation = llm.generate(random_prompt(llm, rng, 20), max_tokens=900, sampling=sampling)
    assert generation.finish_reason == "stop"
    assert generation.token_ids[-1] in llm.tokenizer.stop_ids
    assert not set(generation.token_ids[:-1]) & llm.tokenizer.stop_ids
    assert generation.text == llm.tokenizer.decode(generation.token_ids[:-1])


def test_answer_ends_where_the_context_does(open_tiny: OpenTiny, rng: Random) -> None:
    llm = open_tiny()
    generation = ask(llm, random_prompt(llm, rng, 1021), 50)
    assert generation.finish_reason == "length"
    assert len(generation.token_ids) == 3


def test_blocks_are_free_again_after_a_request_that_its_caller_broke_off(
    open_tiny: OpenTiny, rng: Random
) -> None:
    llm = open_tiny()

    def break_off(text: str) -> None:
        raise ConnectionResetError("the reader went away")

    with pytest.raises(ConnectionResetError):
        llm.generate(random_prompt(llm, rng, 300), max_tokens=50, on_text=break_off)
    assert llm.pool.free_blocks == llm.pool.capacity_blocks


@pytest.mark.parametrize(
    ("prompt_ids", "max_tokens", "message"),
    [
        ([], 1, "prompt tokens: given 0, expected 1 to 1023"),
        ([5] * 1024, 1, "prompt tokens: given 1024"),
        ([5], 0, "max_tokens: given 0"),
        ([5, 268], 1, "token id: given 268, expected 0 to 267"),
        ([-1], 1, "token id: given -1"),
    ],
)
def test_llm_refuses_a_request_it_cannot_answer(
    open_tiny: OpenTiny, prompt_ids: list[int], max_tokens: int, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        open_tiny().generate(prompt_ids, max_tokens=max_tokens)


def test_llm_refuses_requests_after_its_end(open_tiny: OpenTiny) -> None:
    with open_tiny(MemoryStore()) as llm:
        llm.generate([5], max_tokens=1)
    with pytest.raises(EngineClosed):
        llm.generate([5], max_tokens=1)
    assert llm.close()


def test_timings_are_those_of_the_clock_and_add_up(open_tiny: OpenTiny, rng: Random) -> None:
    llm = open_tiny(MemoryStore())
    prompt_ids = random_prompt(llm, rng, 300)
    ask(llm, prompt_ids)
    timings = ask(llm, prompt_ids, 20).timings
    parts = (timings.match_s, timings.fetch_s, timings.prefill_s, timings.decode_s)
    assert min(parts) > 0
    assert timings.ttft_s >= timings.match_s + timings.fetch_s + timings.prefill_s
