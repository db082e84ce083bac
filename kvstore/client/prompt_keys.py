"""Keys of prompts that resemble earlier ones: what they have in common is not hashed again.

A conversation comes back with everything it had and a little more, and many prompts begin with the
same system prompt. Comparing tokens costs a fiftieth of hashing them. Only memory and time are
saved here: the keys are those of `Namespace.block_keys`, always.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ..key import TOKEN_BYTES, ImageSpan, KeyChain, Namespace, TokenIds, encode_tokens
from ..layout import BLOCK_TOKENS

PROMPTS_MAX = 64
"""Prompts that are remembered, of all namespaces."""
TOKENS_MAX = 4 << 20
"""Tokens of all of them: 16 MiB, and 2 MiB of keys."""
CANDIDATES_MAX = 8
"""Earlier prompts of the namespace that a new one is compared with, the last used first."""
COMPARED_TOKENS = 1 << 14
"""Tokens compared in one go; prompts that differ early cost no more than this."""

_Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    namespace_id: bytes
    tokens: _Tokens
    images: tuple[ImageSpan, ...]
    """By position."""
    keys: list[bytes]


class PromptKeys:
    """Remembers recent prompts, a bounded number of them. May be used by several threads."""

    def __init__(self, *, prompts_max: int = PROMPTS_MAX, tokens_max: int = TOKENS_MAX) -> None:
        self._prompts_max = prompts_max
        self._tokens_max = tokens_max
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        """By a number of their own, the last used at the end."""
        self._serial = 0
        self._lock = Lock()
        self.tokens = 0
        self.blocks_hashed = 0
        self.blocks_reused = 0

    @property
    def prompts(self) -> int:
        """Prompts that are remembered; they have `tokens` tokens."""
        return len(self._prompts)

    def block_keys(
        self, namespace: Namespace, token_ids: TokenIds, images: Iterable[ImageSpan] = ()
    ) -> list[bytes]:
        """What `namespace.block_keys` returns and raises. The list is the caller's."""
        encoded = encode_tokens(token_ids)
        tokens = np.frombuffer(encoded, "<i4")
        spans = tuple(sorted(images, key=lambda span: span.start))
        with self._lock:
            nearest, blocks = self._find_nearest(namespace.namespace_id, tokens, spans)
            known = [] if nearest is None else self._prompts[nearest].keys[:blocks]
            chain = KeyChain.after(namespace, known)
            first = chain.token_count
            chain.append_encoded(
                encoded[first * TOKEN_BYTES :], [span for span in spans if span.end > first]
            )
            self.blocks_reused += len(known)
            self.blocks_hashed += len(chain.keys) - len(known)
            if chain.keys:
                prompt = _Prompt(namespace.namespace_id, tokens, spans, chain.keys)
                self._remember(prompt, nearest, blocks)
        return list(chain.keys)

    def _find_nearest(
        self, namespace_id: bytes, tokens: _Tokens, images: tuple[ImageSpan, ...]
    ) -> tuple[int | None, int]:
        """The earlier prompt that shares most leading blocks with this one, and how many."""
        nearest, most, seen = None, 0, 0
        for number in reversed(self._prompts):
            prompt = self._prompts[number]
            if prompt.namespace_id != namespace_id:
                continue
            blocks = count_common_blocks(prompt.tokens, prompt.images, tokens, images)
            if blocks > most:
                nearest, most = number, blocks
            seen += 1
            if seen == CANDIDATES_MAX or most == len(tokens) // BLOCK_TOKENS:
                break
        return nearest, most

    def _remember(self, prompt: _Prompt, nearest: int | None, common_blocks: int) -> None:
        """Keep the prompt, unless `nearest` has all its blocks; if it continues that, it takes the
        other's place."""
        if nearest is not None:
            self._prompts.move_to_end(nearest)
            if len(prompt.keys) == common_blocks:
                return
            if len(self._prompts[nearest].keys) == common_blocks:
                self._forget(nearest)
        self._serial += 1
        self._prompts[self._serial] = prompt
        self.tokens += len(prompt.tokens)
        while len(self._prompts) > self._prompts_max or self.tokens > self._tokens_max:
            self._forget(next(iter(self._prompts)))

    def _forget(self, number: int) -> None:
        self.tokens -= len(self._prompts.pop(number).tokens)


def count_common_blocks(
    tokens: _Tokens,
    images: tuple[ImageSpan, ...],
    other_tokens: _Tokens,
    other_images: tuple[ImageSpan, ...],
) -> int:
    """Leading full blocks that have the same key in both prompts, as far as can be told without
    hashing; no image reaches over their end. Images are sorted by position."""
    common = _count_common_tokens(tokens, other_tokens)
    for one, other in zip_longest(images, other_images):
        if one == other:
            continue
        common = min(common, *(span.start for span in (one, other) if span is not None))
        break
    common = common // BLOCK_TOKENS * BLOCK_TOKENS
    for span in reversed(images):
        if span.start < common < span.end:
            common = span.start // BLOCK_TOKENS * BLOCK_TOKENS
    return common // BLOCK_TOKENS


def _count_common_tokens(tokens: _Tokens, other: _Tokens) -> int:
    length = min(len(tokens), len(other))
    for start in range(0, length, COMPARED_TOKENS):
        end = min(start + COMPARED_TOKENS, length)
        differs = tokens[start:end] != other[start:end]
        at = int(differs.argmax())
        if differs[at]:
            return start + at
    return length
