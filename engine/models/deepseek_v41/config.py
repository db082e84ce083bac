"""Sizes of a DeepSeek-V4.1 model and the role of each layer.

The rules among the sizes are in `config_rules`; reading and writing config.json is `config_file`.
"""

from dataclasses import dataclass
from enum import Enum

WINDOW_SCALE_CHANNELS = 32
"""Channels of a window row that share a scale (FP8 e4m3, UE8M0)."""
MAIN_SCALE_CHANNELS = 16
"""Channels of a main entry that share a scale (FP4 e2m1, e4m3)."""
INDEX_SCALE_CHANNELS = 32
"""Channels of an index key that share a scale (FP4 e2m1, UE8M0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): RoPE stretched from `original_positions` by `factor`."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramConfig:
    """N-gram tables: for each of `layer_ids` one table of `table_rows` rows of `head_dim`."""

    layer_ids: tuple[int, ...]
    table_rows: tuple[int, ...]
    ngram_max: int
    base_rows: int
    """Each n-gram size and head takes the next prime above `base_rows` - 1 rows."""
    heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocabulary: int

    @property
    def columns(self) -> int:
        """Rows that one token looks up in one table."""
        return (self.ngram_max - 1) * self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """DSpark: draft stages that see the target's hidden states of `target_layer_ids`."""

    stages: int
    block_tokens: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    experts: int
    experts_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """DeepSeek-ViT and its aligner.

    An image becomes at most `tokens_max` tokens; smaller images are scaled up to `pixels_min`.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patch_pixels: int
    downsample: int
    tokens_max: int
    pixels_min: int
    norm_epsilon: float = 1e-6
    rope_theta: float = 10_000.0
    aspect_ratio_max: float | None = None
    """Width over height; a wider image is squeezed to it. None for no limit, as released."""


class LayerKind(Enum):
    """Which compressed entries a layer attends to."""

    WINDOW = "window"
    """None: the sliding window only."""
    FULL = "full"
    """Its own, the top-k of all."""
    REINDEX = "reindex"
    """An earlier layer's, the top-k inside the candidate pool."""
    REUSE = "reuse"
    """An earlier layer's, with an earlier layer's top-k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRole:
    """What one layer does; layers are numbered over the model, draft stages after the last."""

    index: int
    kind: LayerKind
    ratio: int
    """Tokens of one compressed entry; 0 for window-only layers."""
    kv_owner: int | None
    """The layer whose compressed entries it attends to; itself if it owns them."""
    is_candidate_source: bool
    is_decoder: bool
    engram: int | None
    """Number of its Engram table, if it has one."""

    @property
    def owns_kv(self) -> bool:
        return self.kv_owner == self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV41Config:
    """A model's sizes. Released values and the meaning of each: config.json of the model."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    output_groups: int
    output_rank: int
    window: int
    compress_ratios: tuple[int, ...]
    """One for each layer, then 0 for each draft stage."""
    kv_source_ids: tuple[int, ...]
    index_source_ids: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source_id: int
    candidate_blocks: int
    candidate_block_entries: int
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnScaling | None
    positions_max: int
    experts: int
    experts_per_token: int
    shared_experts: int
    expert_intermediate: int
    routed_scaling: float
    swiglu_limit: float
    streams: int
    sinkhorn_iterations: int
    stream_epsilon: float
    norm_epsilon: float
    engram: EngramConfig | None
    draft: DraftConfig
    vision: VisionConfig | None
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None

    @property
    def decoder_start(self) -> int:
        """The first layer of the decoder half: the first of ratio 1."""
        return self.compress_ratios.index(1)

    @property
    def ring_rows(self) -> int:
        """Rows of a window ring: the window and what a rejected draft may have overwritten."""
        return self.window + self.draft.block_tokens + 1

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def index_scale(self) -> float:
        return self.index_dim**-0.5 * self.index_heads**-0.5


def plan_layers(config: DeepseekV41Config) -> tuple[LayerRole, ...]:
    """The role of each layer of the model proper: a source is the nearest at or before a layer."""
    engram_layers = config.engram.layer_ids if config.engram else ()
    roles = []
    for index in range(config.layers):
        ratio = config.compress_ratios[index]
        roles.append(
            LayerRole(
                index=index,
                kind=_kind_of(config, index),
                ratio=ratio,
                kv_owner=_nearest(config.kv_source_ids, index) if ratio else None,
                is_candidate_source=index == config.candidate_source_id,
                is_decoder=index >= config.decoder_start,
                engram=engram_layers.index(index) if index in engram_layers else None,
            )
        )
    return tuple(roles)


def _kind_of(config: DeepseekV41Config, index: int) -> LayerKind:
    if config.compress_ratios[index] == 0:
        return LayerKind.WINDOW
    if index in config.kv_source_ids:
        return LayerKind.FULL
    return LayerKind.REINDEX if index in config.index_source_ids else LayerKind.REUSE


def _nearest(sources: tuple[int, ...], index: int) -> int:
    return max(source for source in sources if source <= index)
