"""The operations that a model is made of, as one value: what a back end can replace.

A model calls `operations.sparse_attention(...)`, never a function of a back end by its name. The
contract of an operation (shapes, types, bits) is the docstring of the reference of the same name in
`kernels.reference`. A back end slips in with its own functions for those it is faster at:

    REFERENCE = Operations()
    fast = dataclasses.replace(REFERENCE, sparse_attention=sparse_attention_of_the_back_end)

What a model plans once for a pass or for good (tiles, RoPE frequencies and tables, primes and
multipliers) is no operation: the same for every back end.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .reference import (
    compressor,
    engram,
    experts,
    index_entries,
    index_scores,
    main_entries,
    ngrams,
    norm,
    rope,
    route,
    selection,
    sparse_attention,
    streams,
    window_rows,
)
from .reference import linear as products

TensorFunction = Callable[..., torch.Tensor]
PairFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """One function for each operation; the default of each is the reference."""

    # Rows.
    linear: TensorFunction = products.linear
    rms_norm: TensorFunction = norm.rms_norm
    apply_rope: TensorFunction = rope.apply_rope
    swiglu: TensorFunction = experts.swiglu
    route_tokens: PairFunction = route.route_tokens
    run_experts: TensorFunction = experts.run_experts

    # Streams.
    project_streams: TensorFunction = streams.project_streams
    mix_streams: Callable[..., streams.StreamMix] = streams.mix_streams
    collapse_streams: TensorFunction = streams.collapse_streams
    write_back_streams: TensorFunction = streams.write_back_streams

    # Engram.
    hash_ngrams: TensorFunction = ngrams.hash_ngrams
    read_table_rows: TensorFunction = engram.read_table_rows
    gate_engram: TensorFunction = engram.gate_engram

    # Rows of the cache.
    quantise_window_rows: TensorFunction = window_rows.quantise_window_rows
    dequantise_window_rows: TensorFunction = window_rows.dequantise_window_rows
    quantise_main_entries: TensorFunction = main_entries.quantise_main_entries
    dequantise_main_entries: TensorFunction = main_entries.dequantise_main_entries
    quantise_index_entries: PairFunction = index_entries.quantise_index_entries
    dequantise_index_entries: TensorFunction = index_entries.dequantise_index_entries
    round_index_entries: TensorFunction = index_entries.round_index_entries

    # Attention.
    compress_groups: TensorFunction = compressor.compress_groups
    score_entries: TensorFunction = index_scores.score_entries
    score_candidates: TensorFunction = index_scores.score_candidates
    select_topk: TensorFunction = selection.select_topk
    select_candidate_blocks: TensorFunction = selection.select_candidate_blocks
    candidate_entries: TensorFunction = selection.candidate_entries
    topk_of_candidates: TensorFunction = selection.topk_of_candidates
    sparse_attention: TensorFunction = sparse_attention.sparse_attention


REFERENCE = Operations()
