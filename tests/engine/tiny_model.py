"""A llama model small enough for tests, written as a GGUF file with random weights.

Its vocabulary is that of SmolLM2 cut down: three special tokens, the 256 bytes, a few merges. Tests
take away or replace parts of it to make files with mistakes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from engine.chat import SMOLLM2_TEMPLATE
from engine.tokenizer import byte_alphabet

FloatArray = npt.NDArray[np.float32]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "Ġ t", "Ġt he", "i n", "e r", "Ġ a", "o n", "r e", "Ġ Ġ"]


@dataclass(kw_only=True)
class TinyModel:
    """Parts of the file; `write` puts them together. Sizes are those of `sizes`."""

    layers: int = 2
    hidden: int = 64
    intermediate: int = 96
    heads: int = 4
    kv_heads: int = 2
    context_tokens: int = 1024
    is_tied: bool = True
    seed: int = 1
    architecture: str = "llama"
    without: frozenset[str] = frozenset()
    """Metadata keys and tensors to leave out."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata to add or replace."""
    tensors: Mapping[str, FloatArray] = field(default_factory=dict)
    """Tensors to add or replace."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def tokens(self) -> list[str]:
        return [*SPECIAL, *byte_alphabet(), *[merge.replace(" ", "") for merge in MERGES]]

    def all_metadata(self) -> dict[str, Any]:
        types = [3] * len(SPECIAL) + [1] * (len(self.tokens) - len(SPECIAL))
        defaults = {
            "general.name": "Tiny",
            "llama.block_count": self.layers,
            "llama.embedding_length": self.hidden,
            "llama.feed_forward_length": self.intermediate,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.context_length": self.context_tokens,
            "llama.rope.freq_base": 10_000.0,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": SMOLLM2_TEMPLATE,
        }
        merged = defaults | dict(self.metadata)
        return {key: value for key, value in merged.items() if key not in self.without}

    def all_tensors(self) -> dict[str, FloatArray]:
        kv_rows = self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(self.tokens), self.hidden)}
        if not self.is_tied:
            shapes["output"] = (len(self.tokens), self.hidden)
        for index in range(self.layers):
            shapes |= {
                f"blk.{index}.attn_q": (self.hidden, self.hidden),
                f"blk.{index}.attn_k": (kv_rows, self.hidden),
                f"blk.{index}.attn_v": (kv_rows, self.hidden),
                f"blk.{index}.attn_output": (self.hidden, self.hidden),
                f"blk.{index}.ffn_gate": (self.intermediate, self.hidden),
                f"blk.{index}.ffn_up": (self.intermediate, self.hidden),
                f"blk.{index}.ffn_down": (self.hidden, self.intermediate),
            }
        norms = [f"blk.{i}.{kind}_norm" for i in range(self.layers) for kind in ("attn", "ffn")]
        rng = np.random.default_rng(self.seed)
        tensors = {
            f"{name}.weight": (rng.standard_normal(shape) * 1.5 / shape[-1] ** 0.5).astype("f4")
            for name, shape in shapes.items()
        }
        for name in [*norms, "output_norm"]:
            tensors[f"{name}.weight"] = rng.uniform(0.5, 1.5, self.hidden).astype("f4")
        merged = tensors | dict(self.tensors)
        return {name: data for name, data in merged.items() if name not in self.without}

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.all_metadata().items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, data in self.all_tensors().items():
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
