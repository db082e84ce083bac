"""A DeepSeek-V4.1 of scaled size, made from a seed in seconds, with the cache of V4.1-Flash.

A block has the exact bytes of the released model (113,920 in four sections), and so has a window
row (528): what is fetched, swapped in and saved is the same. What computes is smaller: 11 layers
for 40, hidden 1,024 for 5,120, 8 heads for 64 and 8 experts for 384, 0.8 GB of weights in float32.
`wide` has the released model's widths (hidden 5,120, 64 heads, experts of 2,304, six a token), so
that a pass of a few thousand tokens keeps a GPU busy as the released one does; 13 GB of weights.
`tiny` is for a look on a CPU at whether a benchmark runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from engine.block_pool import BlockPool
from engine.compute_device import name_arithmetic, operations_for
from engine.layout import model_namespace
from engine.models.deepseek_v41.config import (
    DeepseekV41Config,
    DraftConfig,
    EngramConfig,
    YarnScaling,
)
from engine.models.deepseek_v41.config_rules import find_problems
from engine.models.deepseek_v41.layout import block_layout, window_row_bytes
from engine.models.deepseek_v41.load import LoadedModel
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.deepseek_v41.state import StatePool
from engine.runners.v41_runner import V41Runner
from kernels.reference.ngrams import plan_tables

Size: TypeAlias = Literal["scaled", "wide", "tiny"]

VOCABULARY = 4096
FLASH_BLOCK_BYTES = 113_920
FLASH_WINDOW_ROW_BYTES = 528
SEED = 41


def _engram() -> EngramConfig:
    primes, _ = plan_tables(tables=1, ngram_max=4, heads=4, base_rows=2000)
    return EngramConfig(
        layer_ids=(1,),
        table_rows=tuple(primes.sum(-1).tolist()),
        ngram_max=4,
        base_rows=2000,
        heads=4,
        head_dim=64,
        pad_token_id=2,
        compressed_vocabulary=VOCABULARY,
    )


SCALED = DeepseekV41Config(
    vocabulary=VOCABULARY,
    hidden=1024,
    layers=11,
    heads=8,
    head_dim=512,
    rope_dim=64,
    q_rank=384,
    output_groups=4,
    output_rank=256,
    window=128,
    # A window, three owners of ratio 2 with a layer each that reuses, and the decoder half.
    compress_ratios=(0, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 0),
    kv_source_ids=(1, 3, 5, 7),
    index_source_ids=(1, 3, 5, 7, 9),
    index_heads=8,
    index_dim=128,
    index_topk=512,
    candidate_source_id=7,
    candidate_blocks=2048,
    candidate_block_entries=8,
    rope_theta=10_000.0,
    compress_rope_theta=160_000.0,
    yarn=YarnScaling(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_positions=65_536),
    positions_max=1 << 18,
    experts=8,
    experts_per_token=2,
    shared_experts=1,
    expert_intermediate=512,
    routed_scaling=1.5,
    swiglu_limit=10.0,
    streams=4,
    sinkhorn_iterations=20,
    stream_epsilon=1e-6,
    norm_epsilon=1e-20,
    engram=_engram(),
    draft=DraftConfig(
        stages=1,
        block_tokens=5,
        noise_token_id=VOCABULARY - 1,
        target_layer_ids=(8, 9, 10),
        markov_rank=64,
        experts=4,
        experts_per_token=2,
    ),
    vision=None,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    image_token_id=None,
)

WIDE = replace(
    SCALED,
    hidden=5120,
    heads=64,
    q_rank=1280,
    output_groups=8,
    output_rank=1024,
    experts_per_token=6,
    expert_intermediate=2304,
    index_heads=32,
)

TINY = replace(
    SCALED,
    hidden=64,
    heads=2,
    q_rank=32,
    output_groups=2,
    output_rank=16,
    index_heads=2,
    index_topk=32,
    candidate_blocks=16,
    experts=2,
    experts_per_token=1,
    expert_intermediate=32,
    sinkhorn_iterations=2,
    draft=replace(SCALED.draft, markov_rank=8, experts=1, experts_per_token=1),
)


def shape(size: Size) -> DeepseekV41Config:
    """The sizes, checked."""
    config = {"scaled": SCALED, "wide": WIDE, "tiny": TINY}[size]
    problems = find_problems(config)
    assert not problems, problems
    assert block_layout(config).block_bytes == FLASH_BLOCK_BYTES
    assert window_row_bytes(config) == FLASH_WINDOW_ROW_BYTES
    return config


def make_runner(
    size: Size, device: torch.device, *, pool_blocks: int, state_slots: int
) -> V41Runner:
    """A runner with weights of its own, equal for equal sizes and kinds of device."""
    config = shape(size)
    weights = random_weights(config, torch.Generator(device).manual_seed(SEED))
    loaded = LoadedModel(config, weights, torch.arange(config.vocabulary))
    layout = block_layout(config)
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=pool_blocks, device=device)
    namespace = model_namespace(
        name=f"v41-shape-{size}",
        weights_sha256=f"seed {SEED}",
        compute=name_arithmetic("float32", device),
        tokenizer_sha256="none",
        layout=layout,
        tenant="benchmark",
    )
    return V41Runner(
        loaded.build(pool, operations_for(device, config)),
        pool=pool,
        states=StatePool(config, state_slots, device=device),
        namespace=namespace,
    )


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids of text, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY - 1, (length,), generator=generator).tolist()
