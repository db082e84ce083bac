"""Namespaces and key chains: golden vectors, growth, images, and what is refused."""

import json
import runpy
import subprocess
import sys
from array import array
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.key import TOKEN_MAX, ImageSpan, KeyChain, Namespace, TokenIds
from kvstore.layout import BlockLayout, Section

GOLDEN = Path(__file__).parents[1] / "golden"
VECTORS: dict[str, Any] = json.loads((GOLDEN / "keys.json").read_text())

LAYOUT = BlockLayout(sections=(Section("kv", 4096),))
NAMESPACE = Namespace(model="m", weights="w", tokenizer="t", layout=LAYOUT)
WHALE = sha256(b"the whale").digest()
SEA = sha256(b"the sea").digest()

token_ids = st.lists(st.integers(0, TOKEN_MAX), max_size=700)


def namespace_of(vector: dict[str, Any]) -> Namespace:
    names = ("model", "weights", "tokenizer", "lora", "tenant")
    texts = {name: vector[name] for name in names if name in vector}
    sections = tuple(Section(name, size) for name, size in vector["sections"])
    return Namespace(layout=BlockLayout(sections=sections), **texts)


def tokens_of(prompt: dict[str, Any]) -> list[int]:
    a, b, modulus, count = prompt["tokens"]
    return [(a * i + b) % modulus for i in range(count)]


def images_of(prompt: dict[str, Any]) -> list[ImageSpan]:
    return [
        ImageSpan(start=start, length=length, content_hash=bytes.fromhex(content))
        for start, length, content in prompt["images"]
    ]


# --- golden vectors


def test_golden_file_is_what_its_writer_writes() -> None:
    assert runpy.run_path(str(GOLDEN / "write_keys.py"))["vectors"]() == VECTORS


@pytest.mark.parametrize("vector", VECTORS["namespaces"], ids=lambda vector: vector["model"])
def test_namespace_and_layout_match_golden_vectors(vector: dict[str, Any]) -> None:
    namespace = namespace_of(vector)
    assert namespace.layout.fingerprint.hex() == vector["fingerprint"]
    assert namespace.namespace_id.hex() == vector["namespace_id"]
    assert len(namespace.namespace_id) == 16


@pytest.mark.parametrize("vector", VECTORS["namespaces"], ids=lambda vector: vector["model"])
@pytest.mark.parametrize("number", range(len(VECTORS["namespaces"][0]["prompts"])))
def test_block_keys_match_golden_vectors(vector: dict[str, Any], number: int) -> None:
    prompt = vector["prompts"][number]
    keys = namespace_of(vector).block_keys(tokens_of(prompt), images_of(prompt))
    assert [key.hex() for key in keys] == prompt["keys"]


def test_worked_example_of_the_format_page_is_the_first_golden_vector() -> None:
    page = (GOLDEN.parents[1] / "docs/formats/keys.md").read_text()
    vector = VECTORS["namespaces"][0]
    (prompt,) = (prompt for prompt in vector["prompts"] if prompt["name"] == "one block")
    values = (vector["fingerprint"], vector["namespace_id"], *prompt["keys"])
    assert all(f"`{value}`" in page for value in values)
    assert f"printf %s '{vector['canonical_json']}' | sha256sum" in page


def test_keys_are_equal_in_another_process() -> None:
    program = (
        "from kvstore.key import Namespace; from kvstore.layout import BlockLayout, Section\n"
        "layout = BlockLayout(sections=(Section('kv', 4096),))\n"
        "keys = Namespace(model='m', weights='w', tokenizer='t', layout=layout)"
        ".block_keys(range(300))\n"
        "print(b''.join(keys).hex())"
    )
    root = Path(__file__).parents[2]
    printed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": str(root)},
        capture_output=True,
        check=True,
        timeout=30,
    ).stdout
    assert printed.decode().strip() == b"".join(NAMESPACE.block_keys(range(300))).hex()


# --- namespaces


def test_every_member_of_a_namespace_changes_its_id() -> None:
    base = {"model": "a", "weights": "a", "tokenizer": "a", "lora": "a", "tenant": "a"}
    ids = {Namespace(layout=LAYOUT, **base).namespace_id}
    for name in base:
        ids.add(Namespace(layout=LAYOUT, **{**base, name: "b"}).namespace_id)
    other = BlockLayout(sections=(Section("kv", 4160),))
    ids.add(Namespace(layout=other, **base).namespace_id)
    assert len(ids) == 7


def test_texts_are_not_normalised() -> None:
    composed = Namespace(model="\u00e9", weights="w", tokenizer="t", layout=LAYOUT)
    decomposed = Namespace(model="e\u0301", weights="w", tokenizer="t", layout=LAYOUT)
    assert composed.namespace_id != decomposed.namespace_id


@pytest.mark.parametrize("name", ["model", "weights", "tokenizer", "lora", "tenant"])
@pytest.mark.parametrize("value", [None, 5, b"m", "x" * 1025, "é" * 513, "\udc80"])
def test_namespace_is_refused_when_a_text_breaks_a_rule(name: str, value: object) -> None:
    texts: dict[str, Any] = {"model": "m", "weights": "w", "tokenizer": "t", name: value}
    with pytest.raises(InvalidArgument, match=f"{name} of a namespace"):
        Namespace(layout=LAYOUT, **texts)


@pytest.mark.parametrize("name", ["model", "weights", "tokenizer", "tenant"])
def test_namespace_is_refused_when_a_text_other_than_lora_is_empty(name: str) -> None:
    texts = {"model": "m", "weights": "w", "tokenizer": "t", name: ""}
    with pytest.raises(InvalidArgument, match=f"{name} of a namespace"):
        Namespace(layout=LAYOUT, **texts)


def test_namespace_is_refused_when_its_layout_is_no_layout() -> None:
    with pytest.raises(InvalidArgument, match="expected a BlockLayout"):
        Namespace(model="m", weights="w", tokenizer="t", layout="kv")  # type: ignore[arg-type]


# --- chains of tokens


@given(token_ids, st.integers(0, 700))
def test_equal_beginnings_have_equal_keys(tokens: list[int], cut: int) -> None:
    keys = NAMESPACE.block_keys(tokens)
    assert len(keys) == len(tokens) // 128
    assert all(len(key) == 32 for key in keys)
    assert NAMESPACE.block_keys(tokens[:cut]) == keys[: min(cut, len(tokens)) // 128]


@given(token_ids.filter(bool), st.data())
def test_one_other_token_changes_its_block_and_all_after_it(
    tokens: list[int], data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = tokens.copy()
    changed[position] = (changed[position] + 1) % (TOKEN_MAX + 1)
    before, after = NAMESPACE.block_keys(tokens), NAMESPACE.block_keys(changed)
    equal = [one == other for one, other in zip(before, after, strict=True)]
    assert equal == [block < position // 128 for block in range(len(before))]


@given(token_ids, st.lists(st.integers(0, 700)))
def test_chain_that_grows_has_the_keys_of_the_whole(tokens: list[int], cuts: list[int]) -> None:
    chain = KeyChain(NAMESPACE)
    borders = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    returned: list[bytes] = []
    for start, end in pairwise(borders):
        returned += chain.append(tokens[start:end])
    assert chain.keys == returned == NAMESPACE.block_keys(tokens)
    assert chain.token_count == len(tokens)


def test_all_kinds_of_sequences_have_the_same_keys() -> None:
    tokens = list(range(1000, 1300))
    expected = NAMESPACE.block_keys(tokens)
    assert len(expected) == 2
    assert NAMESPACE.block_keys(tuple(tokens)) == expected
    assert NAMESPACE.block_keys(range(1000, 1300)) == expected
    assert NAMESPACE.block_keys(list(np.array(tokens))) == expected
    for typecode in "hHiIlLqQ":
        assert NAMESPACE.block_keys(array(typecode, tokens)) == expected
    for dtype in ("<i4", ">i4", "<u4", "<i8", ">i8", "<u8", "<i2", "<u2"):
        assert NAMESPACE.block_keys(np.array(tokens, dtype=dtype)) == expected
    strided = np.repeat(np.array(tokens, dtype=np.int32), 2)[::2]
    assert not strided.flags.c_contiguous
    assert NAMESPACE.block_keys(strided) == expected


def test_no_tokens_have_no_keys() -> None:
    kinds: list[TokenIds] = [[], (), range(0), array("i"), np.array([], dtype=np.int32)]
    for nothing in kinds:
        assert NAMESPACE.block_keys(nothing) == []


@pytest.mark.parametrize("bad", [-1, 2**31, 2**70, True, 1.0, "7", None, np.float32(1)])
@pytest.mark.parametrize("position", [0, 130, 299])
def test_ids_are_refused_by_position_when_one_is_no_token(bad: object, position: int) -> None:
    tokens: list[Any] = list(range(300))
    tokens[position] = bad
    with pytest.raises(InvalidArgument, match=f"token id at position {position}: given "):
        NAMESPACE.block_keys(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([5, -1], dtype=np.int32),
        np.array([5, 2**31]),
        np.array([5, 2**63], dtype=np.uint64),
    ],
)
def test_ids_are_refused_by_position_when_an_array_holds_one(tokens: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidArgument, match="token id at position 1"):
        NAMESPACE.block_keys(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        *(None, 5, "text", b"bytes", bytearray(8), memoryview(b"bytes"), {1: 2}, {1, 2}, iter([1])),
        *(array("d", [1.0]), array("u", "ab"), np.array([1.0]), np.array([True]), np.array(5)),
        *(np.array(["a"]), np.zeros((2, 128), dtype=np.int32), np.array([])),
    ],
)
def test_ids_are_refused_when_they_are_no_sequence_of_whole_numbers(tokens: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidArgument, match="token ids: given "):
        NAMESPACE.block_keys(tokens)


def test_chain_is_unchanged_when_an_append_is_refused() -> None:
    chain = KeyChain(NAMESPACE)
    chain.append(range(200))
    with pytest.raises(InvalidArgument):
        chain.append([*range(200, 290), -1])
    with pytest.raises(InvalidArgument):
        chain.append([1, 2], [ImageSpan(start=0, length=1, content_hash=WHALE)])
    chain.append(range(200, 300))
    assert chain.keys == NAMESPACE.block_keys(range(300))


# --- images


def test_placeholder_ids_of_an_image_do_not_enter_the_keys() -> None:
    image = ImageSpan(start=100, length=60, content_hash=WHALE)
    tokens = np.arange(256)
    other = tokens.copy()
    other[100:160] = 99
    assert NAMESPACE.block_keys(tokens, [image]) == NAMESPACE.block_keys(other, [image])
    assert NAMESPACE.block_keys(tokens, [image])[0] != NAMESPACE.block_keys(tokens)[0]


def test_image_changes_the_blocks_from_its_first_position_on() -> None:
    tokens = range(512)
    whale = NAMESPACE.block_keys(tokens, [ImageSpan(start=200, length=100, content_hash=WHALE)])
    sea = NAMESPACE.block_keys(tokens, [ImageSpan(start=200, length=100, content_hash=SEA)])
    assert [one == other for one, other in zip(whale, sea, strict=True)] == [True] + 3 * [False]


@pytest.mark.parametrize("byte", [0, 3, 4, 31])
def test_whole_content_hash_counts_when_one_position_lies_in_the_block(byte: int) -> None:
    other = bytearray(WHALE)
    other[byte] ^= 0x80
    keys = [
        NAMESPACE.block_keys(range(128), [ImageSpan(start=127, length=1, content_hash=content)])
        for content in (WHALE, bytes(other))
    ]
    assert keys[0] != keys[1]


def test_two_images_differ_from_one_of_their_joint_length() -> None:
    two = [ImageSpan(start=start, length=8, content_hash=WHALE) for start in (0, 8)]
    one = [ImageSpan(start=0, length=16, content_hash=WHALE)]
    assert NAMESPACE.block_keys(range(128), two) != NAMESPACE.block_keys(range(128), one)


def test_length_of_an_image_counts_in_a_block_that_it_fills() -> None:
    keys = [
        NAMESPACE.block_keys(range(300), [ImageSpan(start=0, length=n, content_hash=WHALE)])[0]
        for n in (128, 129, 300)
    ]
    assert len(set(keys)) == 3


def test_order_of_the_given_spans_does_not_matter() -> None:
    spans = [ImageSpan(start=s, length=20, content_hash=WHALE) for s in (300, 10, 120)]
    assert NAMESPACE.block_keys(range(400), spans) == NAMESPACE.block_keys(range(400), spans[::-1])


@given(st.data())
def test_chain_that_grows_by_text_and_images_has_the_keys_of_the_whole(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 200), max_size=8))
    chain = KeyChain(NAMESPACE)
    images: list[ImageSpan] = []
    for length in lengths:
        start = chain.token_count
        is_image = data.draw(st.booleans())
        new = [ImageSpan(start=start, length=length, content_hash=WHALE)] if is_image else []
        chain.append(range(start, start + length), new)
        images += new
    assert chain.keys == NAMESPACE.block_keys(range(sum(lengths)), images)


@pytest.mark.parametrize(
    "spans",
    [[(0, 10), (9, 5)], [(0, 10), (0, 10)], [(250, 7)], [(256, 1)], [(2**31 - 1, 2**31 - 1)]],
)
def test_images_are_refused_when_they_overlap_or_reach_over_the_end(
    spans: list[tuple[int, int]],
) -> None:
    images = [ImageSpan(start=start, length=n, content_hash=WHALE) for start, n in spans]
    with pytest.raises(InvalidArgument, match="image spans: given positions"):
        NAMESPACE.block_keys(range(256), images)


@pytest.mark.parametrize(
    ("start", "length", "content_hash"),
    [
        *((-1, 1, WHALE), (True, 1, WHALE), (0.0, 1, WHALE), (0, 0, WHALE), (0, "1", WHALE)),
        *((0, 2**31, WHALE), (0, 1, WHALE[:31]), (0, 1, WHALE.hex()), (0, 1, None)),
    ],
)
def test_image_span_is_refused_when_a_value_breaks_a_rule(
    start: object, length: object, content_hash: object
) -> None:
    with pytest.raises(InvalidArgument, match="of an image span"):
        ImageSpan(start=start, length=length, content_hash=content_hash)  # type: ignore[arg-type]
