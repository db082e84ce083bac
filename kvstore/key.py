"""Namespaces and the chain of block keys: which blocks of KV cache are the same block.

Exact bytes, limits and golden vectors: docs/formats/keys.md. A key says what a block is, never
where it lies. Nothing here depends on the process, the machine or a seed.
"""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import InvalidArgument, shown
from .layout import BLOCK_TOKENS, BlockLayout, whole_number

KEY_BYTES = 32
NAMESPACE_ID_BYTES = 16
NAMESPACE_FIELD_BYTES_MAX = 1024
TOKEN_BYTES = 4
TOKEN_MAX = 2**31 - 1
IMAGE_HASH_BYTES = 32
BLOCK_TOKEN_BYTES = BLOCK_TOKENS * TOKEN_BYTES

# A token id is never negative, so bit 31 of a word tells an image part from a token.
IMAGE_MARK = 1 << 31

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids: a list, tuple, range, array('i') or one-dimensional numpy integer array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Positions of a prompt that hold an image: `length` placeholder ids from `start` on.

    `content_hash`: 32 bytes that name the image's content as the model sees it (after resizing).
    The placeholder ids themselves do not enter the keys.
    """

    start: int
    length: int
    content_hash: bytes

    def __post_init__(self) -> None:
        for name, value, least in (("start", self.start, 0), ("length", self.length, 1)):
            number = whole_number(value)
            if number is None or not least <= number <= TOKEN_MAX:
                raise InvalidArgument(
                    what=f"{name} of an image span",
                    given=repr(value),
                    expected=f"a whole number from {least} to {TOKEN_MAX}",
                )
            object.__setattr__(self, name, number)
        if not isinstance(self.content_hash, bytes) or len(self.content_hash) != IMAGE_HASH_BYTES:
            raise InvalidArgument(
                what="content hash of an image span",
                given=_described(self.content_hash),
                expected=f"{IMAGE_HASH_BYTES} bytes",
            )

    @property
    def end(self) -> int:
        """First position after the span."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that makes two KV blocks of equal tokens different.

    `namespace_id`: 16 bytes, the start of the sha256 of the canonical JSON. Texts are taken as
    they are, without Unicode normalisation. Raises InvalidArgument for an empty text (only `lora`
    may be empty), for one longer than 1,024 bytes of UTF-8 and for a layout of another type.
    """

    model: str
    weights: str
    tokenizer: str
    layout: BlockLayout
    lora: str = ""
    tenant: str = "default"
    namespace_id: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layout, BlockLayout):
            raise InvalidArgument(
                what="layout of a namespace",
                given=_described(self.layout),
                expected="a BlockLayout",
            )
        members = {"layout": self.layout.fingerprint.hex()}
        for name in ("model", "weights", "tokenizer", "lora", "tenant"):
            members[name] = _checked_text(name, getattr(self, name), may_be_empty=name == "lora")
        text = json.dumps(members, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest = hashlib.sha256(text.encode()).digest()
        object.__setattr__(self, "namespace_id", digest[:NAMESPACE_ID_BYTES])

    def block_keys(self, token_ids: TokenIds, images: Iterable[ImageSpan] = ()) -> list[bytes]:
        """32-byte keys, one for each full block of 128 tokens; a shorter rest has no key.

        Raises InvalidArgument for ids that are bool, float, negative or above 2^31 - 1, and for
        image spans that overlap or reach over the end of the tokens. int32 arrays are fastest.
        """
        return KeyChain(self).append(token_ids, images)


class KeyChain:
    """Keys of a prompt that grows: each token is hashed once, however often the prompt grows.

    Not for use by two threads at once. `keys` grows in place; do not change it.
    """

    __slots__ = ("_images", "_pending", "_previous", "keys", "token_count")

    def __init__(self, namespace: Namespace) -> None:
        self.keys: list[bytes] = []
        self.token_count = 0
        self._previous = namespace.namespace_id
        self._pending = b""
        self._images: list[ImageSpan] = []

    @classmethod
    def after(cls, namespace: Namespace, keys: Sequence[bytes]) -> Self:
        """A chain that goes on behind the blocks of `keys`, which no image span reaches over."""
        chain = cls(namespace)
        chain.keys = list(keys)
        chain.token_count = len(keys) * BLOCK_TOKENS
        chain._previous = keys[-1] if keys else namespace.namespace_id
        return chain

    def append(self, token_ids: TokenIds, images: Iterable[ImageSpan] = ()) -> list[bytes]:
        """Take the next tokens of the prompt; return the keys of the blocks they complete.

        Positions of `images` count from the start of the prompt, and each span lies within the
        tokens of this call. On an error nothing has changed.
        """
        return self.append_encoded(encode_tokens(token_ids), images)

    def append_encoded(self, encoded: bytes, images: Iterable[ImageSpan] = ()) -> list[bytes]:
        """`append` for tokens that `encode_tokens` has checked."""
        end = self.token_count + len(encoded) // TOKEN_BYTES
        spans = self._images + _checked_images(images, start=self.token_count, end=end)
        material = self._pending + encoded if self._pending else encoded
        new_keys = self._hash_blocks(material, spans)
        hashed = len(new_keys) * BLOCK_TOKENS + len(self.keys) * BLOCK_TOKENS
        self.keys += new_keys
        self.token_count = end
        self._previous = new_keys[-1] if new_keys else self._previous
        self._pending = material[len(new_keys) * BLOCK_TOKEN_BYTES :]
        self._images = [span for span in spans if span.end > hashed]
        return new_keys

    def _hash_blocks(self, material: bytes, spans: list[ImageSpan]) -> list[bytes]:
        """Keys of the blocks in `material`. A long prompt waits for this: the loop is kept bare."""
        if spans:
            return self._hash_blocks_with_images(material, spans)
        previous = self._previous
        sha256, keys = hashlib.sha256, []
        whole = len(material) - len(material) % BLOCK_TOKEN_BYTES
        for at in range(0, whole, BLOCK_TOKEN_BYTES):
            previous = sha256(previous + material[at : at + BLOCK_TOKEN_BYTES]).digest()
            keys.append(previous)
        return keys

    def _hash_blocks_with_images(self, material: bytes, spans: list[ImageSpan]) -> list[bytes]:
        view = memoryview(material)
        first_block = len(self.keys)
        by_block = _images_by_block(spans)
        previous = self._previous
        keys = []
        for index in range(len(material) // BLOCK_TOKEN_BYTES):
            block = view[index * BLOCK_TOKEN_BYTES : (index + 1) * BLOCK_TOKEN_BYTES]
            inside = by_block.get(first_block + index)
            if inside is None:
                previous = hashlib.sha256(previous + block).digest()
            else:
                start = (first_block + index) * BLOCK_TOKENS
                previous = hashlib.sha256(previous + _with_images(block, start, inside)).digest()
            keys.append(previous)
        return keys


def _with_images(block: memoryview, block_start: int, spans: list[ImageSpan]) -> bytes:
    """The block's material with each image part in place of its placeholder ids.

        word 0: 2^31 + placeholders replaced | word 1: offset within the span | word 2: length of
        the span | 32 bytes content hash

    The whole hash goes into every block the span touches. Filling only the placeholders' own words
    would leave 31 bits of it where a span has one position in a block.
    """
    parts: list[bytes | memoryview] = []
    position = block_start
    for span in spans:
        begin = max(span.start, block_start)
        end = min(span.end, block_start + BLOCK_TOKENS)
        text = slice((position - block_start) * TOKEN_BYTES, (begin - block_start) * TOKEN_BYTES)
        words = (IMAGE_MARK + end - begin, begin - span.start, span.length)
        parts += (block[text], *(word.to_bytes(4, "little") for word in words), span.content_hash)
        position = end
    parts.append(block[(position - block_start) * TOKEN_BYTES :])
    return b"".join(parts)


def _images_by_block(spans: list[ImageSpan]) -> dict[int, list[ImageSpan]]:
    by_block: dict[int, list[ImageSpan]] = {}
    for span in spans:
        for block in range(span.start // BLOCK_TOKENS, (span.end - 1) // BLOCK_TOKENS + 1):
            by_block.setdefault(block, []).append(span)
    return by_block


def _checked_images(images: Iterable[ImageSpan], *, start: int, end: int) -> list[ImageSpan]:
    spans = sorted(images, key=lambda span: span.start)
    position = start
    for span in spans:
        if span.start < position or span.end > end:
            raise InvalidArgument(
                what="image spans",
                given=f"positions {span.start} to {span.end - 1}",
                expected=f"no overlap, and all within positions {position} to {end - 1}",
            )
        position = span.end
    return spans


def encode_tokens(token_ids: TokenIds) -> bytes:
    """The ids as little-endian int32, four bytes each. Raises InvalidArgument like block_keys."""
    if isinstance(token_ids, np.ndarray):
        return _array_bytes(token_ids)
    if isinstance(token_ids, array) and token_ids.typecode in "bBhHiIlLqQ":
        return _array_bytes(np.asarray(token_ids))
    is_text = isinstance(token_ids, (str, bytes, bytearray, memoryview, array))
    if is_text or not isinstance(token_ids, Sequence):
        raise InvalidArgument(
            what="token ids",
            given=_described(token_ids),
            expected="a list, tuple or range of ints, array('i'), or a numpy integer array",
        )
    if bool in set(map(type, token_ids)):
        raise _bad_token(token_ids)
    try:
        return _array_bytes(np.asarray(array("i", token_ids)))
    except (TypeError, OverflowError):
        raise _bad_token(token_ids) from None


def _array_bytes(token_ids: npt.NDArray[Any]) -> bytes:
    if token_ids.dtype.kind not in "iu" or token_ids.ndim != 1:
        raise InvalidArgument(
            what="token ids",
            given=f"an array of {token_ids.dtype} with {token_ids.ndim} dimensions",
            expected="integers in one dimension",
        )
    if token_ids.size and (token_ids.min() < 0 or token_ids.max() > TOKEN_MAX):
        raise _bad_token(token_ids.tolist())
    return token_ids.astype("<i4", copy=False).tobytes()


def _bad_token(token_ids: Sequence[object]) -> InvalidArgument:
    """The error for the first id that is no token id; there is one."""
    for index, value in enumerate(token_ids):
        number = whole_number(value)
        if number is None or not 0 <= number <= TOKEN_MAX:
            return InvalidArgument(
                what=f"token id at position {index}",
                given=shown(value),
                expected=f"a whole number from 0 to {TOKEN_MAX}",
            )
    raise AssertionError("no bad token id among those refused")


def _checked_text(name: str, value: object, *, may_be_empty: bool) -> str:
    expected = f"a text of {0 if may_be_empty else 1} to {NAMESPACE_FIELD_BYTES_MAX} bytes of UTF-8"
    if not isinstance(value, str):
        raise InvalidArgument(
            what=f"{name} of a namespace", given=_described(value), expected=expected
        )
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        length = sys.maxsize
    if length > NAMESPACE_FIELD_BYTES_MAX or (length == 0 and not may_be_empty):
        raise InvalidArgument(what=f"{name} of a namespace", given=shown(value), expected=expected)
    return value


def _described(value: object) -> str:
    """Type and size of a value, for messages: values may be long or secret."""
    if isinstance(value, (str, bytes, bytearray)):
        return f"{type(value).__name__} of length {len(value)}"
    return f"{type(value).__name__} {value!r}"[:80]
