"""Builds a llama model from a GGUF file: names, shapes and the order of rows."""

import torch

from .gguf_file import GgufFile
from .llama import LlamaLayer, LlamaModel
from .llama_config import LlamaConfig

OUTPUT = "output.weight"
"""Absent where the output matrix is the embedding (tied weights)."""


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape (rows first) of every tensor a llama file may hold."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocabulary, config.hidden),
        "output_norm.weight": (config.hidden,),
        OUTPUT: (config.vocabulary, config.hidden),
    }
    for index in range(config.layers):
        layer = {
            "attn_norm": (config.hidden,),
            "attn_q": (config.q_rows, config.hidden),
            "attn_k": (config.kv_rows, config.hidden),
            "attn_v": (config.kv_rows, config.hidden),
            "attn_output": (config.hidden, config.q_rows),
            "ffn_norm": (config.hidden,),
            "ffn_gate": (config.intermediate, config.hidden),
            "ffn_up": (config.intermediate, config.hidden),
            "ffn_down": (config.hidden, config.intermediate),
        }
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def build_model(file: GgufFile, config: LlamaConfig, dtype: torch.dtype) -> LlamaModel:
    """Read all weights; matrices in `dtype`, norms in float32. The file has been checked."""
    embedding = file.tensor("token_embd.weight").to(dtype)
    is_tied = OUTPUT not in file.tensor_shapes
    return LlamaModel(
        config,
        embedding_VE=embedding,
        layers=[_layer(file, config, index, dtype) for index in range(config.layers)],
        output_norm_E=file.tensor("output_norm.weight"),
        output_VE=embedding if is_tied else file.tensor(OUTPUT).to(dtype),
    )


def _layer(file: GgufFile, config: LlamaConfig, index: int, dtype: torch.dtype) -> LlamaLayer:
    def read(name: str) -> torch.Tensor:
        return file.tensor(f"blk.{index}.{name}.weight")

    q = split_pairs(read("attn_q"), config.heads)
    k = split_pairs(read("attn_k"), config.kv_heads)
    return LlamaLayer(
        attention_norm_E=read("attn_norm"),
        qkv=torch.cat((q, k, read("attn_v"))).to(dtype),
        attention_output=read("attn_output").to(dtype),
        feed_forward_norm_E=read("ffn_norm"),
        gate_up=torch.cat((read("ffn_gate"), read("ffn_up"))).to(dtype),
        down=read("ffn_down").to(dtype),
    )


def split_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's order of q and k rows: RoPE pairs (2i, 2i + 1) become (i, i + D / 2).

    llama files keep the two rows of a pair side by side; rotating halves needs no strided reads.
    """
    rows, hidden = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(rows, hidden)
