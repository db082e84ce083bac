"""Text becomes the ids an independent tokenizer gives, never special tokens, and comes back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat import Message, encode_chat
from engine.errors import InvalidRequest
from engine.models.gguf_file import GgufFile
from engine.tokenizer import Tokenizer, read_tokenizer
from tests.engine.tiny_model import SPECIAL, TinyModel

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "golden/tokenizer.json").read_text(encoding="utf-8")
)


def open_tokenizer(path: Path) -> Tokenizer:
    file = GgufFile.open(path)
    data = read_tokenizer(file)
    file.raise_problems()
    return Tokenizer(data)


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Tokenizer:
    return open_tokenizer(tiny_path)


@pytest.fixture(scope="module")
def smollm(smollm_path: Path) -> Tokenizer:
    return open_tokenizer(smollm_path)


@pytest.mark.parametrize("case", GOLDEN["texts"], ids=lambda case: repr(case["text"])[:30])
def test_tokenizer_gives_the_golden_ids(smollm: Tokenizer, case: dict[str, Any]) -> None:
    assert smollm.encode(case["text"]) == case["ids"]
    assert smollm.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("case", GOLDEN["chats"], ids=lambda case: f"{len(case['chat'])} turns")
def test_chat_gives_the_ids_of_the_files_own_template(
    smollm: Tokenizer, case: dict[str, Any]
) -> None:
    messages = [Message(turn["role"], turn["content"]) for turn in case["chat"]]
    assert encode_chat(smollm, messages) == case["ids"]


@pytest.mark.parametrize("name", SPECIAL)
def test_text_of_a_special_token_is_encoded_as_text(tiny: Tokenizer, name: str) -> None:
    ids = tiny.encode(f"before {name} after")
    assert not set(ids) & set(tiny.data.special_ids.values())
    assert tiny.decode(ids) == f"before {name} after"


@given(st.text())
def test_tokenizer_gives_text_back(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert not set(ids) & set(tiny.data.special_ids.values())


@given(st.text())
def test_text_has_no_more_bytes_than_its_tokens_can_have(tiny: Tokenizer, text: str) -> None:
    assert len(text.encode()) <= len(tiny.encode(text)) * tiny.token_bytes_max


@given(st.lists(st.integers(0, 267)))
def test_stream_gives_the_text_of_all_tokens_in_pieces(tiny: Tokenizer, ids: list[int]) -> None:
    stream = tiny.text_stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join([*pieces, stream.finish()]) == tiny.decode(ids)


def test_stream_holds_a_character_back_until_its_last_byte(tiny: Tokenizer) -> None:
    stream = tiny.text_stream()
    pieces = [stream.push(token_id) for token_id in tiny.encode("é鲸")]
    assert pieces == ["", "é", "", "", "鲸"]


def test_decode_marks_bytes_that_are_no_text(tiny: Tokenizer) -> None:
    half = tiny.encode("é")[:1]
    assert tiny.decode([*half, *tiny.encode("x")]) == "\ufffdx"


def test_special_id_names_the_known_ones_when_asked_for_another(tiny: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"given '<\|nothing\|>', expected one of"):
        tiny.special_id("<|nothing|>")


def test_tokenizer_stops_at_the_end_of_a_turn_and_of_text(tiny: Tokenizer) -> None:
    assert tiny.stop_ids == {0, 2}


def test_fingerprint_differs_when_a_merge_does(tmp_path: Path) -> None:
    tiny = TinyModel()
    swapped = TinyModel(metadata={"tokenizer.ggml.merges": ["Ġ t", "h e"]})
    fingerprints = {
        open_tokenizer(model.write(tmp_path / "model.gguf")).data.sha256
        for model in (tiny, swapped, TinyModel(seed=9))
    }
    assert len(fingerprints) == 2
