"""Sizes of a llama model, and how they stand in the metadata of a GGUF file."""

from dataclasses import dataclass

from ..layout import KVGeometry
from .gguf_file import GgufFile

ARCHITECTURE = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a llama model; `context_tokens` is the longest sequence it was trained for."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int
    rope_base: float
    norm_epsilon: float

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def geometry(self) -> KVGeometry:
        """Of its KV cache."""
        return KVGeometry(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def problems(self) -> list[str]:
        """Every rule these sizes break, in words; empty if there is none."""
        sizes = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("rope_base", "norm_epsilon")
        }
        found = [
            f"{name}: given {size}, expected 1 or more" for name, size in sizes.items() if size < 1
        ]
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            found.append(
                f"heads: given {self.heads}, expected a multiple of {self.kv_heads} kv heads"
            )
        if self.head_dim % 2:
            found.append(f"head_dim: given {self.head_dim}, expected an even number (RoPE pairs)")
        if self.rope_base <= 0 or self.norm_epsilon <= 0:
            found.append(
                f"rope_base {self.rope_base}, norm_epsilon {self.norm_epsilon}: expected above 0"
            )
        return found


def read_config(file: GgufFile) -> LlamaConfig:
    """Config from the metadata; problems are noted on the file and leave sizes of 0.

    Every key is read under the file's own architecture name, so that a file of another architecture
    shows all it lacks at once.
    """
    architecture = file.read("general.architecture", str) or ARCHITECTURE
    if architecture != ARCHITECTURE:
        file.problems.append(f"architecture: given {architecture!r}, expected {ARCHITECTURE!r}")

    def number(key: str, default: int | None = None) -> int:
        return file.read(f"{architecture}.{key}", int, default)

    hidden = number("embedding_length")
    heads = number("attention.head_count")
    head_dim = number("attention.key_length", hidden // heads if heads else 0)
    token_rows = file.tensor_shapes.get("token_embd.weight", (0,))[0]
    config = LlamaConfig(
        layers=number("block_count"),
        hidden=hidden,
        intermediate=number("feed_forward_length"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocabulary=number("vocab_size", token_rows),
        context_tokens=number("context_length"),
        rope_base=file.read(f"{architecture}.rope.freq_base", float, 10_000.0),
        norm_epsilon=file.read(f"{architecture}.attention.layer_norm_rms_epsilon", float),
    )
    file.problems += config.problems()
    _refuse_variants(file, architecture, config)
    return config


def _refuse_variants(file: GgufFile, architecture: str, config: LlamaConfig) -> None:
    """Note metadata that asks for computations this model does not do."""
    fixed = {
        "rope.dimension_count": config.head_dim,
        "attention.value_length": config.head_dim,
        "expert_count": 0,
        "rope.scaling.type": "none",
    }
    for key, expected in fixed.items():
        given = file.metadata.get(f"{architecture}.{key}", expected)
        if given != expected:
            file.problems.append(
                f"metadata {architecture}.{key}: given {given!r}, expected {expected!r}"
            )
