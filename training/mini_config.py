"""The sizes of `v41-mini`: every kind of layer of V4.1 in at most 8 million parameters.

    python -m training.mini_config

prints them by part. `training.export` writes them as the config.json of the trained folder.
"""

from collections import Counter

import torch

from engine.models.deepseek_v41.checkpoint.tensor_schema import tensor_schema
from engine.models.deepseek_v41.config import (
    DeepseekV41Config,
    DraftConfig,
    EngramConfig,
    YarnScaling,
)
from engine.models.deepseek_v41.config_rules import find_problems
from kernels.reference.ngrams import plan_tables

from .command import InvalidInput

PARAMETERS_MAX = 8_000_000
VOCABULARY, POSITIONS_MAX = 2_048, 4_096
ENGRAM_LAYERS = (1, 3)
NGRAM_MAX, NGRAM_HEADS, NGRAM_ROWS, NGRAM_CHANNELS = 4, 2, 3_900, 32


def mini_config(compressed_vocabulary: int) -> DeepseekV41Config:
    """`compressed_vocabulary`: Engram's ids over the vocabulary of the model's tokenizer.

    Layers: window, Full of ratio 2, Reuse, Full of ratio 2; then the decoder half: Full with the
    candidate pool, Reuse, Reindex, Reuse. Trained at 2,048 tokens a sequence, so that the pool (256
    positions) and the top 64 leave most entries out.
    """
    config = DeepseekV41Config(
        vocabulary=VOCABULARY,
        hidden=192,
        layers=8,
        heads=4,
        head_dim=64,
        rope_dim=32,
        q_rank=96,
        output_groups=2,
        output_rank=64,
        window=128,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0),
        kv_source_ids=(1, 3, 4),
        index_source_ids=(1, 3, 4, 6),
        index_heads=8,
        index_dim=32,
        index_topk=64,
        candidate_source_id=4,
        candidate_blocks=32,
        candidate_block_entries=8,
        rope_theta=10_000.0,
        compress_rope_theta=160_000.0,
        yarn=YarnScaling(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_positions=1_024),
        positions_max=POSITIONS_MAX,
        experts=8,
        experts_per_token=2,
        shared_experts=1,
        expert_intermediate=64,
        routed_scaling=1.5,
        swiglu_limit=10.0,
        streams=4,
        sinkhorn_iterations=20,
        stream_epsilon=1e-6,
        norm_epsilon=1e-20,
        engram=_engram(compressed_vocabulary),
        draft=DraftConfig(
            stages=3,
            block_tokens=5,
            noise_token_id=VOCABULARY - 1,
            target_layer_ids=(5, 6, 7),
            markov_rank=32,
            experts=4,
            experts_per_token=2,
        ),
        vision=None,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=None,
    )
    problems = find_problems(config)
    assert not problems, problems
    return config


def config_of_ids(compressed_ids_V: torch.Tensor) -> DeepseekV41Config:
    """For a tokenizer with these ids, int64 [V]; raises InvalidInput for another vocabulary."""
    if len(compressed_ids_V) != VOCABULARY:
        given = f"{len(compressed_ids_V)} tokens"
        raise InvalidInput("tokenizer of the data", given=given, expected=f"{VOCABULARY}")
    return mini_config(int(compressed_ids_V.max()) + 1)


def _engram(compressed_vocabulary: int) -> EngramConfig:
    primes, _ = plan_tables(
        tables=len(ENGRAM_LAYERS), ngram_max=NGRAM_MAX, heads=NGRAM_HEADS, base_rows=NGRAM_ROWS
    )
    return EngramConfig(
        layer_ids=ENGRAM_LAYERS,
        table_rows=tuple(primes.sum(-1).tolist()),
        ngram_max=NGRAM_MAX,
        base_rows=NGRAM_ROWS,
        heads=NGRAM_HEADS,
        head_dim=NGRAM_CHANNELS,
        pad_token_id=2,
        compressed_vocabulary=compressed_vocabulary,
    )


def parameters_by_part(config: DeepseekV41Config) -> Counter[str]:
    """Numbers in all tensors, by part; every expert and n-gram row counts."""
    parts: Counter[str] = Counter()
    for name, spec in tensor_schema(config).items():
        count = 1
        for size in spec.shape:
            count *= size
        parts[_part_of(name)] += count
    return parts


_PARTS = {
    "n-gram tables": ".engram.embed.",
    "n-gram projections": ".engram.",
    "mHC": ".hc_",
    "indexers": ".indexer.",
    "attention": ".attn",
    "experts": ".ffn",
}


def _part_of(name: str) -> str:
    owner = "draft: " if name.startswith("mtp.") else ""
    for part, mark in _PARTS.items():
        if mark in name:
            return owner + part
    return owner + "embedding, heads and norms"


def main() -> None:
    parts = parameters_by_part(mini_config(compressed_vocabulary=VOCABULARY))
    for part, count in parts.items():
        print(f"{part:34}{count:>10,}")
    total = parts.total()
    print(f"{'total':34}{total:>10,} of at most {PARAMETERS_MAX:,}")
    assert total <= PARAMETERS_MAX, total


if __name__ == "__main__":
    main()
