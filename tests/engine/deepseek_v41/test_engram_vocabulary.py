"""Engram's smaller vocabulary: golden ids, the rule by Python's own tables, and a model's file."""

import dataclasses
import json
import os
import re
import unicodedata
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE

from engine.errors import MissingModel, ModelFileError
from engine.models.deepseek_v41 import tokenizer_file
from engine.models.deepseek_v41.config import DeepseekV41Config, EngramConfig
from engine.models.deepseek_v41.engram_vocabulary import (
    compress_token_texts,
    fold_text,
    read_compressed_ids,
)
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.tokenizer_file import TOKENIZER_FILE
from engine.tokenizer import byte_alphabet
from tests.golden_folder import golden_folder

KEPT = Path(__file__).parent / "golden" / "engram_normalise.json"
SPECIAL = ["<s>", "</s>", "<pad>"]
WORDS = [b"The", b" The", b"the", b"THE", b"\n\n", b"  ", b"\xe4", b"\xe4\xbd", b"\xe4\xbd\xa0"]
# Three special tokens; one id for the word, one for white space; bytes of a character; all of it.
WORD_IDS = [0, 1, 2, 3, 3, 3, 3, 4, 4, 5, 6, 7]


def golden_strings(source: str) -> tuple[list[str], list[str], list[int]]:
    """Texts, spellings and ids."""
    if source == "kept":
        kept = json.loads(KEPT.read_text(encoding="utf-8"))
        return kept["strings"], kept["spellings"], kept["compressed_ids"]
    path = golden_folder() / "units" / "engram_normalise.json"
    golden = json.loads(path.read_text(encoding="utf-8"))
    strings = golden["strings"]
    return strings, [f"r{index}" for index in range(len(strings))], golden["compressed_ids"]


def fold_by_rule(text: str) -> str:
    """The rule with Python's tables of Unicode, character by character."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c.lower() for c in text if not unicodedata.category(c).startswith("M"))
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip().replace("\ue000", " ")


@pytest.mark.parametrize("source", ["kept", "folder"])
def test_compressed_ids_are_the_golden_ones(source: str) -> None:
    strings, spellings, expected = golden_strings(source)
    assert compress_token_texts(strings, spellings).tolist() == expected


def test_texts_are_folded_as_by_the_rule() -> None:
    blocks = [*range(0x20, 0x250), *range(0x370, 0x600), *range(0x1E00, 0x2150)]
    blocks += [*range(0x3040, 0x3100), *range(0xAC00, 0xAC80), *range(0xFF00, 0xFF70)]
    for code in blocks:
        for text in (chr(code), f" a{chr(code)}\tB "):
            assert fold_text(text) == fold_by_rule(text), f"U+{code:04X}"


def test_sigma_is_lowercased_without_regard_to_the_end_of_a_word() -> None:
    assert fold_text("\u03a7\u03a3") == "\u03c7\u03c3"


def test_text_of_which_nothing_is_left_stands_for_itself() -> None:
    assert compress_token_texts(["\u0301", "\u0300", "", "\u0301"]).tolist() == [0, 1, 2, 0]


def test_ids_are_numbered_as_they_are_first_seen() -> None:
    ids = compress_token_texts(["b", "a", "B", "c", " A"])
    assert ids.dtype == torch.int64
    assert ids.tolist() == [0, 1, 0, 2, 1]


def test_bytes_that_are_no_text_go_by_their_spelling() -> None:
    # 0xC4 is spelled as a capital A with diaeresis, which as a text folds to "a".
    assert compress_token_texts([b"a", b"\xc4", b"\xc4\x80", b"\xc4", b"\xc5"]).tolist() == [
        0, 1, 0, 1, 2,
    ]  # fmt: skip
    assert compress_token_texts(["\ufffd", "\ufffd"], ["x", "y"]).tolist() == [0, 1]


def test_text_that_needs_a_spelling_and_has_none_is_refused() -> None:
    with pytest.raises(ValueError, match="spelling"):
        compress_token_texts(["a", "\ufffd"])


def write_tokenizer(folder: Path) -> Path:
    """Special tokens and WORDS, spelled byte by byte as in a byte-level vocabulary."""
    character = {byte: spelled for spelled, byte in byte_alphabet().items()}
    spelled = ["".join(character[byte] for byte in word) for word in WORDS]
    vocabulary = {token: index for index, token in enumerate(SPECIAL + spelled)}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(SPECIAL)
    path = folder / TOKENIZER_FILE
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    return path


def config_of(*, vocabulary: int = 16, **engram: int) -> DeepseekV41Config:
    nano = shipped_config("v41-nano")
    assert isinstance(nano.engram, EngramConfig)
    sizes = {"compressed_vocabulary": max(WORD_IDS) + 1, "pad_token_id": 2} | engram
    changed = dataclasses.replace(nano.engram, **sizes)  # type: ignore[arg-type]
    return dataclasses.replace(nano, vocabulary=vocabulary, engram=changed)


def test_ids_of_a_model_come_from_its_tokenizer_and_the_rest_are_pads(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    ids = read_compressed_ids(tmp_path, config_of(vocabulary=16))
    assert ids.tolist() == [*WORD_IDS, 2, 2, 2, 2]
    assert read_compressed_ids(tmp_path, config_of(vocabulary=12)).tolist() == WORD_IDS


def test_ids_stay_as_they_are_in_a_model_without_engram(tmp_path: Path) -> None:
    config = dataclasses.replace(config_of(), engram=None)
    assert read_compressed_ids(tmp_path, config).tolist() == list(range(16))


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingModel, match=TOKENIZER_FILE):
        read_compressed_ids(tmp_path, config_of())


@pytest.mark.parametrize("text", [b"", b"{", b'{"model": 1}', b"[]", b"\xff\xfe{}"])
def test_file_that_is_no_tokenizer_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / TOKENIZER_FILE).write_bytes(text)
    with pytest.raises(ModelFileError, match=r"no tokenizer|not sound JSON"):
        read_compressed_ids(tmp_path, config_of())


# Each of them ends a process that gives it to the library, or takes what is no Exception through.
HOSTILE = {
    "decoder": {"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 5}},
    "endless decoder": {
        "decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "a"}
    },
    "no decoder": {"decoder": None},
    "vocabulary": {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}},
    "id": {"model": {"vocab": {"a": "0"}}},
    "id that is a truth": {"model": {"vocab": {"a": True}}},
    "id below 0": {"model": {"vocab": {"a": -1}}},
    "id without end": {"model": {"vocab": {"a": 10**400}}},
    "half of a pair": {"model": {"vocab": {"\ud800": 0}}},
    "added tokens": {"added_tokens": None},
    "added token": {"added_tokens": [7]},
    "nameless token": {"added_tokens": [{"id": 1}]},
    "one id for two": {"added_tokens": [{"id": 3, "content": "<x>"}]},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tokenizer_that_makes_no_sense_is_refused(tmp_path: Path, case: str) -> None:
    path = write_tokenizer(tmp_path)
    content = json.loads(path.read_text(encoding="utf-8")) | HOSTILE[case]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"no tokenizer|two tokens"):
        read_compressed_ids(tmp_path, config_of())


def test_what_ids_do_not_follow_from_is_left_alone(tmp_path: Path) -> None:
    """The library ends the process for such a merge, and panics for such a normaliser."""
    path = write_tokenizer(tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"] |= {"merges": [["a", "\u00e9"]], "continuing_subword_prefix": "x"}
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert read_compressed_ids(tmp_path, config_of(vocabulary=12)).tolist() == WORD_IDS


def test_ids_are_those_of_the_texts_that_the_library_decodes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path)))
    names = ["<\uff5cend\u2581of\uff5c>", "\ufffd", "caf\u00e9", "<S>"]
    tokenizer.add_tokens(names)
    (tmp_path / TOKENIZER_FILE).write_text(tokenizer.to_str(), encoding="utf-8")
    spelled = {index: token for token, index in tokenizer.get_vocab().items()}
    texts = [tokenizer.decode([index], skip_special_tokens=False) for index in range(16)]
    expected = compress_token_texts(texts, [spelled[index] for index in range(16)])
    config = config_of(compressed_vocabulary=int(expected.max()) + 1)
    assert torch.equal(read_compressed_ids(tmp_path, config), expected)


@pytest.mark.timeout(20)
def test_pipe_is_no_tokenizer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TOKENIZER_FILE)
    with pytest.raises(MissingModel, match="not a regular file"):
        read_compressed_ids(tmp_path, config_of())


def test_file_that_cannot_be_read_or_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / TOKENIZER_FILE).mkdir()
    with pytest.raises(MissingModel, match="no such file"):
        read_compressed_ids(tmp_path, config_of())
    (tmp_path / TOKENIZER_FILE).rmdir()
    path = write_tokenizer(tmp_path)
    monkeypatch.setattr(tokenizer_file, "TOKENIZER_BYTES_MAX", path.stat().st_size - 1)
    with pytest.raises(ModelFileError, match="expected at most"):
        read_compressed_ids(tmp_path, config_of())


def test_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    with pytest.raises(ModelFileError, match="12 tokens, expected 3 to 11"):
        read_compressed_ids(tmp_path, config_of(vocabulary=11))
    with pytest.raises(ModelFileError, match=r"8 compressed ids, expected .* 9"):
        read_compressed_ids(tmp_path, config_of(compressed_vocabulary=9))
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["the"] = 14
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelFileError, match="ids up to 14 for 12 tokens"):
        read_compressed_ids(tmp_path, config_of())
