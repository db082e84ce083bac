"""The rules among the sizes of a model: what the formulas and the cache's layout take for granted.

Whole numbers of any size come in; each broken rule goes out as a sentence, none as an exception.
"""

from collections.abc import Iterator
from itertools import pairwise

from kernels.reference.ngrams import plan_tables
from kvstore.layout import BLOCK_TOKENS

from .config import (
    INDEX_SCALE_CHANNELS,
    WINDOW_SCALE_CHANNELS,
    DeepseekV41Config,
    EngramConfig,
    VisionConfig,
)

SIZE_MAX = 2**31 - 1
"""No size of a real model comes near; above, products would leave int64."""
LAYERS_MAX = 1024
"""Of each kind: layers of the model, draft stages, layers of the vision encoder."""
EXPERTS_MAX = 4096
EXPERTS_MAX_ALL_LAYERS = 1 << 17
"""Each expert has tensors with names of their own; a wrong number must not become a long list."""
STREAMS_MAX = 64
SINKHORN_ITERATIONS_MAX = 1000
NGRAM_MAX = 16
ENGRAM_HEADS_MAX = 256
ENGRAM_COLUMNS_MAX = 4096
"""Each column needs a prime of its own, which takes time to find."""
DRAFT_BLOCK_MAX = 64
INDEX_TOPK_MAX = 1 << 14
CANDIDATE_ENTRIES_MAX = 1 << 18
"""Each token of a pass has lists of so many entries; V4.1-Flash has 512, and 16,384 in its pool."""
IMAGE_PATCHES_MAX = 1 << 18
IMAGE_PIXELS_MAX = 1 << 26
"""Of the largest size that an image may get; V4.1-Flash has 9,216 patches of 196 pixels."""

THETAS = (2.0, 1e12)
ASPECT_RATIOS = (1.0, 1e9)
EPSILONS = (2.0**-126, 1.0)
"""A norm divides a row of zeros by the root of it, in float32."""
NUMBERS = {
    "rope_theta": THETAS,
    "compress_rope_theta": THETAS,
    "routed_scaling": (1e-12, 1e12),
    "swiglu_limit": (1e-12, 1e12),
    "stream_epsilon": (0.0, 1.0),
    "norm_epsilon": EPSILONS,
}
YARN_NUMBERS = {"factor": (1.0, 1e6), "beta_slow": (1e-6, 1e6), "beta_fast": (1e-6, 1e6)}
"""Far wider than what models have, and still nothing overflows, nor has a logarithm of 0."""

SIZES = (
    *("vocabulary", "hidden", "heads", "q_rank", "output_groups", "output_rank"),
    *("window", "index_heads", "candidate_block_entries"),
    *("positions_max", "shared_experts", "expert_intermediate"),
)


def find_problems(config: DeepseekV41Config) -> list[str]:
    """Every rule these sizes break, in words; empty if there is none."""
    found = [
        *_size_problems(config),
        *_number_problems(config),
        *_expert_problems(config),
        *_token_problems(config),
        *_layer_problems(config),
        *_selection_problems(config),
        *_draft_problems(config),
    ]
    if config.engram:
        engram_problems = list(_engram_problems(config, config.engram))
        found += engram_problems or list(_table_problems(config.engram))
    if config.vision:
        found += _vision_problems(config, config.vision)
    return found


def _outside(name: str, value: float, low: float, high: float = SIZE_MAX) -> list[str]:
    if low <= value <= high:
        return []
    return [f"{name}: given {value}, expected {low} to {high}"]


def _not_multiple(name: str, value: int, of: int) -> list[str]:
    if of <= value <= SIZE_MAX and value % of == 0:
        return []
    return [f"{name}: given {value}, expected a multiple of {of}, at least {of}"]


def _size_problems(config: DeepseekV41Config) -> Iterator[str]:
    for name in SIZES:
        yield from _outside(name, getattr(config, name), 1)
    yield from _outside("streams", config.streams, 1, STREAMS_MAX)
    iterations = config.sinkhorn_iterations
    yield from _outside("sinkhorn_iterations", iterations, 1, SINKHORN_ITERATIONS_MAX)
    yield from _not_multiple("head_dim", config.head_dim, WINDOW_SCALE_CHANNELS)
    yield from _not_multiple("index_dim", config.index_dim, INDEX_SCALE_CHANNELS)
    yield from _not_multiple("rope_dim", config.rope_dim, 2)
    if config.rope_dim > min(config.head_dim, config.index_dim):
        yield f"rope_dim: given {config.rope_dim}, expected at most head_dim and index_dim"
    if config.output_groups >= 1:
        yield from _not_multiple("heads", config.heads, config.output_groups)
    if config.window > BLOCK_TOKENS:
        yield f"window: given {config.window}, expected at most a block, {BLOCK_TOKENS}"


def _number_problems(config: DeepseekV41Config) -> Iterator[str]:
    for name, (low, high) in NUMBERS.items():
        yield from _outside(name, getattr(config, name), low, high)
    yarn = config.yarn
    if yarn:
        for name, (low, high) in YARN_NUMBERS.items():
            yield from _outside(f"yarn {name}", getattr(yarn, name), low, high)
        if yarn.beta_fast < yarn.beta_slow:
            yield f"yarn beta_fast: given {yarn.beta_fast}, expected at least beta_slow"
        yield from _outside("yarn original_positions", yarn.original_positions, 1)


def _expert_problems(config: DeepseekV41Config) -> Iterator[str]:
    draft = config.draft
    yield from _outside("experts", config.experts, 1, EXPERTS_MAX)
    yield from _outside("experts_per_token", config.experts_per_token, 1, config.experts)
    if draft.stages > 0:
        yield from _outside("draft experts", draft.experts, 1, EXPERTS_MAX)
        yield from _outside("draft experts_per_token", draft.experts_per_token, 1, draft.experts)
    count = config.layers * config.experts + draft.stages * draft.experts
    if count > EXPERTS_MAX_ALL_LAYERS:
        yield f"experts of all layers: given {count}, expected at most {EXPERTS_MAX_ALL_LAYERS}"


def _token_problems(config: DeepseekV41Config) -> Iterator[str]:
    named = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id")}
    named["pad_token_id"] = config.pad_token_id
    if config.image_token_id is not None:
        named["image_token_id"] = config.image_token_id
    if config.draft.stages > 0:
        named["draft noise_token_id"] = config.draft.noise_token_id
    if config.engram:
        named["engram pad_token_id"] = config.engram.pad_token_id
    for name, value in named.items():
        yield from _outside(name, value, 0, config.vocabulary - 1)


def _layer_problems(config: DeepseekV41Config) -> list[str]:
    ratios, stages = config.compress_ratios, config.draft.stages
    counts = _outside("layers", config.layers, 1, LAYERS_MAX)
    counts += _outside("draft stages", stages, 0, LAYERS_MAX)
    if counts:
        return counts
    if len(ratios) != config.layers + stages:
        return [
            f"compress_ratios: given {len(ratios)} entries, expected one for each of "
            f"{config.layers} layers and {stages} draft stages"
        ]
    found = []
    if any(ratios[config.layers :]):
        given = list(ratios[config.layers :])
        found.append(f"compress_ratios of the draft stages: given {given}, expected 0")
    main = ratios[: config.layers]
    for index, ratio in enumerate(main):
        if ratio < 0 or (ratio and BLOCK_TOKENS % ratio):
            found.append(
                f"compress ratio of layer {index}: given {ratio}, expected 0 or a divisor of "
                f"{BLOCK_TOKENS}"
            )
    if 1 not in main[1:] or main[0] == 1:
        return [*found, "compress_ratios: expected encoder layers, then a decoder half of ratio 1"]
    split = main.index(1)
    if set(main[split:]) != {1}:
        found.append(f"compress_ratios from layer {split} on: expected 1 in each decoder layer")
    return [*found, *_source_problems(config, main, split)]


def _source_problems(config: DeepseekV41Config, main: tuple[int, ...], split: int) -> Iterator[str]:
    owners, indexers = config.kv_source_ids, config.index_source_ids
    named = {"kv_source_ids": owners, "index_source_ids": indexers}
    long = [name for name, sources in named.items() if len(sources) > config.layers]
    if long:
        yield f"{' and '.join(long)}: expected at most {config.layers} layers"
        return
    for name, sources in named.items():
        if any(later <= earlier for earlier, later in pairwise(sources)):
            yield f"{name}: given {list(sources)}, expected ascending layers, each once"
        for source in sources:
            if not 0 <= source < config.layers:
                yield f"{name}: given {source}, expected layers 0 to {config.layers - 1}"
            elif not main[source]:
                yield f"{name}: given {source}, expected a layer with a compress ratio"
    for source in sorted(set(owners) - set(indexers)):
        yield f"kv_source_ids: layer {source} is expected to be an index source too"
    for source in sorted(set(indexers) - set(owners)):
        if source <= split:
            yield f"index_source_ids: layer {source} has neither entries nor a pool before it"
    if [source for source in owners if source >= split] != [split]:
        yield f"kv_source_ids: given {list(owners)}, expected {split} as the decoder's only one"
    for index, ratio in enumerate(main):
        before = [source for source in owners if 0 <= source <= index]
        if ratio and not before:
            yield f"kv_source_ids: given {list(owners)}, expected one at or before layer {index}"
        elif ratio and main[max(before)] != ratio:
            yield f"layer {index}: ratio {ratio} is not that of its kv source, layer {max(before)}"


def _selection_problems(config: DeepseekV41Config) -> Iterator[str]:
    split = config.compress_ratios.index(1) if 1 in config.compress_ratios else None
    if config.candidate_source_id != split:
        yield (
            f"candidate_source_id: given {config.candidate_source_id}, expected the first decoder "
            f"layer, {split}"
        )
    topk_max = min(INDEX_TOPK_MAX, config.positions_max)
    yield from _outside("index_topk", config.index_topk, 1, topk_max)
    entries = max(config.candidate_block_entries, 1)
    blocks_max = min(CANDIDATE_ENTRIES_MAX // entries, -(-config.positions_max // entries))
    yield from _outside("candidate_blocks", config.candidate_blocks, 1, blocks_max)
    # The newest block is always in the pool, and may hold one entry only.
    pool = (config.candidate_blocks - 1) * config.candidate_block_entries + 1
    if pool < config.index_topk:
        yield (
            f"index_topk: given {config.index_topk}, expected at most {pool}, what the smallest "
            "candidate pool holds"
        )
    if BLOCK_TOKENS % entries:
        yield f"candidate_block_entries: given {entries}, expected a divisor of {BLOCK_TOKENS}"


def _draft_problems(config: DeepseekV41Config) -> Iterator[str]:
    draft = config.draft
    # The spare rows of a ring are there without stages too.
    yield from _outside("draft block_tokens", draft.block_tokens, 1, DRAFT_BLOCK_MAX)
    if draft.stages <= 0:
        return
    yield from _outside("draft markov_rank", draft.markov_rank, 1)
    targets, ratios = draft.target_layer_ids, config.compress_ratios
    first = ratios.index(1) if 1 in ratios else 0
    if not targets or any(not first <= target < config.layers for target in targets):
        yield (
            f"draft target_layer_ids: given {list(targets)}, expected layers {first} to "
            f"{config.layers - 1}"
        )
    if list(targets) != sorted(set(targets)):
        # Their hidden states stand side by side in the order in which the layers run.
        yield f"draft target_layer_ids: given {list(targets)}, expected each layer once, ascending"


def _engram_problems(config: DeepseekV41Config, engram: EngramConfig) -> Iterator[str]:
    if len(engram.layer_ids) != len(engram.table_rows):
        yield f"engram table_rows: given {len(engram.table_rows)}, expected {len(engram.layer_ids)}"
    split = config.compress_ratios.index(1) if 1 in config.compress_ratios else config.layers
    late = [layer for layer in engram.layer_ids if not 0 <= layer < split]
    if late:
        yield f"engram layer_ids: given {late}, expected layers of the encoder only"
    if any(later <= earlier for earlier, later in pairwise(engram.layer_ids)):
        yield f"engram layer_ids: given {list(engram.layer_ids)}, expected ascending, each once"
    yield from _outside("engram ngram_max", engram.ngram_max, 2, NGRAM_MAX)
    yield from _outside("engram heads", engram.heads, 1, ENGRAM_HEADS_MAX)
    yield from _outside("engram base_rows", engram.base_rows, 2)
    yield from _not_multiple("engram head_dim", engram.head_dim, WINDOW_SCALE_CHANNELS)
    vocabulary = engram.compressed_vocabulary
    yield from _outside("engram compressed_vocabulary", vocabulary, 1, config.vocabulary)
    columns = len(engram.layer_ids) * engram.columns
    yield from _outside("engram columns of all tables", columns, 1, ENGRAM_COLUMNS_MAX)


def _table_problems(engram: EngramConfig) -> Iterator[str]:
    primes, _ = plan_tables(
        tables=len(engram.layer_ids),
        ngram_max=engram.ngram_max,
        heads=engram.heads,
        base_rows=engram.base_rows,
    )
    expected = primes.sum(-1).tolist()
    if list(engram.table_rows) != expected:
        given = list(engram.table_rows)
        yield f"engram table_rows: given {given}, expected {expected}, the sums of their primes"


def _vision_problems(config: DeepseekV41Config, vision: VisionConfig) -> Iterator[str]:
    if config.image_token_id is None:
        yield "image_token_id: not given, expected one where there is a vision tower"
    yield from _outside("vision layers", vision.layers, 1, LAYERS_MAX)
    for name in ("hidden", "heads", "intermediate", "patch_pixels", "downsample"):
        yield from _outside(f"vision {name}", getattr(vision, name), 1)
    # A start, one token, its newline, an end.
    yield from _outside("vision tokens_max", vision.tokens_max, 4, IMAGE_PATCHES_MAX)
    yield from _outside("vision pixels_min", vision.pixels_min, 1, IMAGE_PIXELS_MAX)
    patches = vision.tokens_max * vision.downsample**2
    if patches > IMAGE_PATCHES_MAX or patches * vision.patch_pixels**2 > IMAGE_PIXELS_MAX:
        yield (
            f"vision tokens_max: given {vision.tokens_max}, expected an image of at most "
            f"{IMAGE_PATCHES_MAX} patches and {IMAGE_PIXELS_MAX} pixels"
        )
    if vision.heads >= 1:
        # Two axes, each rotated in pairs.
        yield from _not_multiple("vision hidden", vision.hidden, 4 * vision.heads)
    yield from _outside("vision rope_theta", vision.rope_theta, *THETAS)
    yield from _outside("vision norm_epsilon", vision.norm_epsilon, *EPSILONS)
    if vision.aspect_ratio_max is not None:
        yield from _outside("vision aspect_ratio_max", vision.aspect_ratio_max, *ASPECT_RATIOS)
