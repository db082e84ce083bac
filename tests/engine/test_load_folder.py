"""A folder becomes a runner with its text; what its files say is taken whole or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.compute_device import TF32_OVERRIDE
from engine.errors import InvalidRequest, MissingModel, ModelFileError
from engine.load import LoadedRunner, PoolMemory, load_runner, open_model
from engine.model_identity import identity_of, read_identity
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.tokenizer_file import read_text_tokenizer
from engine.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "models" / "v41-mini"
SPLIT = r"\p{N}{1,3}"


def load(path: Path, **options: object) -> LoadedRunner:
    return load_runner(path, **({"pool_blocks": 4, "state_slots": 2} | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def mini() -> LoadedRunner:
    return load(MODEL)


@pytest.fixture(scope="module")
def library() -> LibraryTokenizer:
    tokenizer = LibraryTokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def test_folder_has_windows_states_and_sections(mini: LoadedRunner) -> None:
    runner = mini.runner
    assert (mini.name, mini.compute) == ("v41-mini", "float32")
    assert runner.free_states == 2
    assert runner.pool.block_bytes == runner.namespace.layout.block_bytes == 13_568
    assert runner.window_layout is not None
    assert runner.state_layout is not None
    assert len(runner.namespace.layout.sections) == 3
    assert runner.vocabulary == mini.tokenizer.vocabulary == 2048


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "meta", "a GPU", "cpu:1"])
def test_device_that_is_not_there_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match=r"device: given .*, expected cpu, cuda"):
        load(MODEL, device=device)


def test_gpu_with_products_of_10_bits_is_refused_before_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.load.choose_device", lambda name: torch.device("cuda", 0))
    monkeypatch.delattr("engine.load.open_folder")
    monkeypatch.setenv(TF32_OVERRIDE, "1")
    with pytest.raises(InvalidRequest, match="float32 products on a GPU: given TF32"):
        load(MODEL, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_blocks_of_a_gpu_are_not_those_of_a_cpu(mini: LoadedRunner, compute: str) -> None:
    """They differ in the last bits, and a hit has to give the answer of a cold run."""
    loaded = load(MODEL, device="cuda", compute=compute)
    assert loaded.compute == compute
    assert loaded.runner.namespace != mini.runner.namespace
    assert f"compute:{compute} cuda sm" in loaded.runner.namespace.weights
    assert open_model(MODEL).identity == identity_of(loaded.runner.namespace, MODEL)
    assert loaded.runner.pool.memory.device.type == "cuda"


def test_namespace_is_that_of_the_contents_wherever_the_folder_lies(
    mini: LoadedRunner, tmp_path: Path
) -> None:
    moved = shutil.copytree(MODEL, tmp_path / "another-name")
    assert load(moved, decoder_tail_tokens=200).runner.namespace == mini.runner.namespace
    assert load(moved, tenant="b").runner.namespace != mini.runner.namespace
    document = json.loads((moved / "tokenizer.json").read_text(encoding="utf-8"))
    document["model"]["merges"][-2:] = reversed(document["model"]["merges"][-2:])
    (moved / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    assert load(moved).runner.namespace.tokenizer != mini.runner.namespace.tokenizer


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compute": "bfloat16"}, "compute: given bfloat16"),
        ({"decoder_tail_tokens": 100}, "decoder tail tokens: given 100"),
        ({"pool_blocks": 0}, "pool blocks: given 0"),
        ({"state_slots": 0}, "state slots: given 0"),
    ],
)
def test_what_a_folder_cannot_be_run_with_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        load(MODEL, **options)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load(tmp_path)


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(MissingModel, match=r"tokenizer\.json"):
        load(folder)


@given(st.text())
def test_text_becomes_the_ids_of_the_library_and_comes_back(
    mini: LoadedRunner, library: LibraryTokenizer, text: str
) -> None:
    ids = mini.tokenizer.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert mini.tokenizer.decode(ids) == text


def test_special_tokens_are_those_of_the_config_and_give_no_text(mini: LoadedRunner) -> None:
    tokenizer = mini.tokenizer
    assert tokenizer.data.begin_id == 0
    assert tokenizer.stop_ids == {1}
    assert tokenizer.decode([0, *tokenizer.encode("x = 1"), 1]) == "x = 1"
    assert 1 not in tokenizer.encode("<|end_of_text|>")


def write(folder: Path, change: Callable[[dict[str, Any]], None] = lambda document: None) -> Path:
    """A small tokenizer.json of 256 bytes, one merge and two added tokens, and a change of it."""
    vocabulary = {token: index for index, token in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary["12"] = 256
    tokenizer = LibraryTokenizer(BPE(vocabulary, [("1", "2")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|eos|>"])
    tokenizer.add_tokens(["<think鲸>"])
    document = json.loads(tokenizer.to_str())
    change(document)
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def read(folder: Path) -> Tokenizer:
    return Tokenizer(read_text_tokenizer(folder, shipped_config("v41-nano")))


def test_added_token_that_is_not_special_is_text_but_never_comes_of_text(tmp_path: Path) -> None:
    tokenizer = read(write(tmp_path))
    assert tokenizer.vocabulary == 384
    assert tokenizer.decode([258, 257, 383]) == "<think鲸>"
    assert 258 not in tokenizer.encode("<think鲸>")
    assert tokenizer.data.special_ids == {"<|eos|>": 257}


def test_cut_by_an_expression_is_that_of_the_library(tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated"}
        last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        steps = [split | {"invert": False}, last | {"trim_offsets": True}]
        document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        document["model"]["merges"] += [["12", "3"], ["4", "5"]]
        document["model"]["vocab"] |= {"123": 259, "45": 260}

    tokenizer = read(write(tmp_path, change))
    library = LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "12345 and 45 12"
    assert tokenizer.encode(text) == library.encode(text).ids
    assert tokenizer.data.sha256 != read(write(tmp_path)).data.sha256


UNUSABLE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "model": (lambda d: d["model"].update(type="WordPiece"), "model.type: given 'WordPiece'"),
    "prefix": (
        lambda d: d["model"].update(continuing_subword_prefix="##"),
        "model.continuing_subword_prefix",
    ),
    "whole words first": (lambda d: d["model"].update(ignore_merges=True), "ignore_merges"),
    "normalizer": (lambda d: d.update(normalizer={"type": "NFC"}), "normalizer: given"),
    "unknown merge": (lambda d: d["model"]["merges"].append(["q", "zz"]), "1 merges of unknown"),
    "merge of three": (lambda d: d["model"]["merges"].append(["a", "b", "c"]), "expected pairs"),
    "no merges": (lambda d: d["model"].pop("merges"), "model.merges: given None"),
    "no cuts": (lambda d: d.update(pre_tokenizer=None), "pre_tokenizer: given None"),
    "empty cuts": (
        lambda d: d.update(pre_tokenizer={"type": "Sequence", "pretokenizers": []}),
        "the last is ByteLevel",
    ),
    "too many cuts": (
        lambda d: d.update(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits"}] * 15
                + [{"type": "ByteLevel", "add_prefix_space": False}, {"type": "Metaspace"}],
            }
        ),
        "given 17 steps",
    ),
    "unknown cut": (lambda d: d.update(pre_tokenizer={"type": "Metaspace"}), "another step"),
    "broken expression": (
        lambda d: d.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}
        ),
        "another step",
    ),
    "hole in the ids": (lambda d: d["model"]["vocab"].pop("a"), "ids up to 258 for 258 tokens"),
    "not bytes": (lambda d: d["model"]["vocab"].update({"鲸": 259}), "not byte-level"),
    "twice": (lambda d: d["model"]["vocab"].update({"<|eos|>": 259}), "stand there twice"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_tokenizer_that_is_not_plain_byte_level_bpe_is_refused(tmp_path: Path, case: str) -> None:
    change, match = UNUSABLE[case]
    with pytest.raises(ModelFileError, match=match):
        read(write(tmp_path, change))  # type: ignore[arg-type]


def test_more_tokens_than_the_model_has_are_refused(tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        alphabet = sorted(ByteLevel.alphabet())
        pairs = [a + b for a in alphabet[:12] for b in alphabet[:12]]
        document["model"]["vocab"] |= {pair: 259 + index for index, pair in enumerate(pairs)}

    with pytest.raises(ModelFileError, match="given 403 tokens, expected 2 to 384"):
        read(write(tmp_path, change))


def test_client_and_worker_name_a_model_alike(mini: LoadedRunner, tiny_path: Path) -> None:
    file = load(tiny_path)
    for loaded, path in ((mini, MODEL), (file, tiny_path)):
        assert open_model(path).identity == identity_of(loaded.runner.namespace, path)
    assert open_model(MODEL).identity != open_model(tiny_path).identity
    assert open_model(MODEL).identity.describe().startswith("v41-mini (deepseek_v41, token")


def test_identity_that_a_worker_tells_comes_back_and_is_shown_on_one_line() -> None:
    own = open_model(MODEL).identity
    assert read_identity(own.to_document() | {"namespace": "ab"}) == own
    strange_ones: list[object] = [None, [], {}, own.to_document() | {"name": 5}]
    for said in strange_ones:
        assert read_identity(said) is None
    strange = read_identity({"name": "a\nb", "tokenizer": "\x1b[2J", "source": "s" * 4096})
    assert strange is not None
    assert strange.describe() == f"{'s' * 100} (a?b, tokenizer ?[2J)"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_pool_without_room_for_a_block_is_refused_before_weights_are_read(
    kind: str, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reader in ("load_checkpoint", "build_model"):
        monkeypatch.delattr(f"engine.load.{reader}")
    path = MODEL if kind == "folder" else tiny_path
    with pytest.raises(InvalidRequest, match=r"memory of the block pool: given 100 bytes, expec"):
        load(path, pool_blocks=PoolMemory(100))
