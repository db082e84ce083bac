"""How one block of a dense model's KV cache lies in memory, and the namespace its keys live in.

The bytes are written and read by `paged_kv`; here are only sizes, order and names. In order of
bytes a block is

    layer 0: K [kv head][token][dim]  V [kv head][token][dim] | layer 1: K V | ... | last layer: K V

in bfloat16, little-endian, K after RoPE with the pairs (i, i + D / 2). Heads stand outside tokens,
so that attention reads one run of 128 x D numbers a head; layers stand outermost, so that a store
can deliver layer by layer.
"""

from dataclasses import dataclass

from kvstore.key import NAMESPACE_FIELD_BYTES_MAX, Namespace
from kvstore.layout import BLOCK_TOKENS, BlockLayout, Section

KV_BYTES = 2
"""Bytes of one number of the cache (bfloat16)."""

LAYOUT_NAME = "kv-bf16-v1"
"""Stands in every section's name: another order of the same bytes must never share a key."""

MODEL_NAME_CHARACTERS_MAX = NAMESPACE_FIELD_BYTES_MAX // 4

FOLDER_MODEL = "deepseek_v41"
"""Stands in the namespace of a folder's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Sizes of a dense model's KV cache."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer in one block."""
        return 2 * self.kv_heads * BLOCK_TOKENS * self.head_dim * KV_BYTES

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes


def block_layout(geometry: KVGeometry) -> BlockLayout:
    """Layout of one block: a section for each layer, in layer order."""
    sections = [
        Section(f"L{index} {LAYOUT_NAME}", geometry.layer_bytes) for index in range(geometry.layers)
    ]
    layout = BlockLayout(sections=tuple(sections))
    assert layout.block_bytes == geometry.block_bytes
    return layout


def namespace_model(name: str) -> str:
    """The name of a model as a namespace has it."""
    return name[:MODEL_NAME_CHARACTERS_MAX]


def namespace_tokenizer(sha256: str) -> str:
    """A tokenizer as a namespace has it."""
    return f"sha256:{sha256}"


def model_namespace(
    *,
    name: str,
    weights_sha256: str,
    compute: str,
    tokenizer_sha256: str,
    layout: BlockLayout,
    tenant: str,
) -> Namespace:
    """Namespace of the blocks a model computes.

    `compute` is the type the matrices run in, and for a GPU the kind of card and the releases that
    its last bits depend on (`compute_device.name_arithmetic`). It belongs to the weights' revision:
    bfloat16 and float32 runs differ in the last bits of K and V, and a hit has to give the answer
    of a cold run.
    """
    return Namespace(
        model=namespace_model(name),
        weights=f"sha256:{weights_sha256} compute:{compute}",
        tokenizer=namespace_tokenizer(tokenizer_sha256),
        layout=layout,
        tenant=tenant,
    )
