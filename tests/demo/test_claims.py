"""Each claim holds exactly when what it says is so."""

import pytest

from demo.claims import (
    Claim,
    claim_answer_hit,
    claim_blocks_rebuilt,
    claim_damage_found,
    claim_full_hit,
    claim_no_error,
    claim_no_hit,
    claim_recovered,
    claim_same_answer,
    claim_saved,
)
from tests.demo.replies import make_reply

EARLIER = make_reply(prompt_ids=range(300))


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        (claim_no_hit(make_reply(hit_tokens=0)), True),
        (claim_no_hit(make_reply(hit_tokens=128)), False),
        (claim_full_hit(make_reply(hit_tokens=256), [EARLIER]), True),
        (claim_full_hit(make_reply(hit_tokens=128), [EARLIER]), False),
        (claim_full_hit(make_reply(hit_tokens=384), [EARLIER]), False),
        (claim_full_hit(make_reply(prompt_ids=range(90)), [EARLIER]), False),
        (claim_answer_hit(make_reply(hit_tokens=384), EARLIER), True),
        (claim_answer_hit(make_reply(hit_tokens=256), EARLIER), False),
        (claim_same_answer(EARLIER, EARLIER, 1), True),
        (claim_same_answer(make_reply(token_ids=(1, 2)), EARLIER, 1), False),
        (claim_same_answer(make_reply(prompt_ids=range(299)), EARLIER, 1), False),
        (claim_saved(make_reply(blocks_stored=2)), True),
        (claim_saved(make_reply(blocks_stored=1, hit_tokens=128)), True),
        (claim_saved(make_reply(blocks_stored=1)), False),
        (claim_saved(make_reply(blocks_stored=2, blocks_failed=1)), False),
        (claim_no_error(make_reply(store_errors=0)), True),
        (claim_no_error(make_reply(store_errors=1)), False),
        (claim_blocks_rebuilt(1), True),
        (claim_blocks_rebuilt(0), False),
        (claim_damage_found(2, 1, 1), True),
        (claim_damage_found(2, 0, 1), False),
        (claim_damage_found(2, 1, 0), False),
        (claim_recovered("n01", blocks=3, before=3), True),
        (claim_recovered("n01", blocks=2, before=3), False),
        (claim_recovered("n01", blocks=0, before=0), False),
        (claim_recovered("n01", blocks=None, before=None), False),
    ],
)
def test_claim_holds_exactly_when_it_is_so(claim: Claim, holds: bool) -> None:
    assert claim.holds is holds


def test_claim_names_what_was_expected_and_what_came() -> None:
    claim = claim_full_hit(make_reply(hit_tokens=128), [EARLIER])
    assert claim.text == "hit: 128 tokens taken, 256 are stored"
