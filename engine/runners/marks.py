"""How far a sequence is, as bytes that go to another engine: the marks of a hand-over.

    prefix: magic, version, xxh3-64 of all that follows it
    facts: computed tokens, hit tokens, replay tokens, whether there was a window
    the family's own

Only what can be of a sequence with these tokens is taken. The bytes of blocks are not known here.
"""

import struct

import xxhash

from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import WINDOW_TOKENS, HitPlan

from ..errors import HandoverRefused
from ..model_runner import Buffer
from ..sequence import Sequence

MAGIC = b"CHMK"
VERSION = 1
PREFIX = struct.Struct("<4sIQ")
FACTS = struct.Struct("<QQII")


def write_marks(sequence: Sequence, family: bytes = b"") -> bytes:
    """The marks with the family's own; not for a sequence in the middle of a replay.

    Blocks that are there and not computed again yet would have to go too.
    """
    hit = sequence.hit
    assert sequence.computed_tokens >= hit.hit_tokens + hit.replay_tokens, sequence.computed_tokens
    has_window = hit.window_anchor is not None
    facts = FACTS.pack(sequence.computed_tokens, hit.hit_tokens, hit.replay_tokens, has_window)
    rest = facts + family
    return PREFIX.pack(MAGIC, VERSION, xxhash.xxh3_64_intdigest(rest)) + rest


def read_marks(data: Buffer, sequence: Sequence) -> tuple[int, HitPlan, memoryview]:
    """Computed tokens, the hit, and the family's own.

    Raises HandoverRefused for bytes that cannot be of `sequence`, by its tokens.
    """
    view = memoryview(data).cast("B")
    least_bytes = PREFIX.size + FACTS.size
    _expect("bytes of the marks", len(view), len(view) >= least_bytes, f"{least_bytes} or more")
    magic, version, xxh3 = PREFIX.unpack_from(view)
    _expect("magic of the marks", magic, magic == MAGIC, MAGIC)
    _expect("version of the marks", version, version == VERSION, VERSION)
    found = xxhash.xxh3_64_intdigest(view[PREFIX.size :])
    _expect("checksum of the marks", found, found == xxh3, xxh3)
    computed, hit_tokens, replay_tokens, has_window = FACTS.unpack_from(view, PREFIX.size)
    known = len(sequence.token_ids)
    _expect("computed tokens", computed, computed <= known, f"at most {known}")
    is_border = hit_tokens % BLOCK_TOKENS == 0
    _expect("hit tokens", hit_tokens, is_border, f"a multiple of {BLOCK_TOKENS}")
    _expect("replay tokens", replay_tokens, replay_tokens in (0, WINDOW_TOKENS), (0, WINDOW_TOKENS))
    stored_tokens = hit_tokens + replay_tokens
    _expect("hit and replay tokens", stored_tokens, stored_tokens <= computed, f"up to {computed}")
    allowed = (0, 1) if hit_tokens and not replay_tokens else (0,)
    _expect("whether there was a window", has_window, has_window in allowed, allowed)
    plan = HitPlan(hit_tokens, replay_tokens, hit_tokens if has_window else None)
    return computed, plan, view[least_bytes:]


def _expect(what: str, given: object, is_right: bool, expected: object) -> None:
    if not is_right:
        raise HandoverRefused(what, given=given, expected=expected)
