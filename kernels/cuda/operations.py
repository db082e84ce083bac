"""The back end for a GPU as a value. Operations that are not here run as the reference writes them:
they are elementwise, or small, and know no device. Bytes of cache rows are made and read by chains
of them; `kernels.gpu.operations` has a kernel for each."""

import dataclasses

from ..operations import REFERENCE
from . import engram, experts, index_scores, linear, norm, selection, sparse_attention, streams

CUDA_OPERATIONS = dataclasses.replace(
    REFERENCE,
    linear=linear.linear,
    rms_norm=norm.rms_norm,
    run_experts=experts.run_experts,
    project_streams=streams.project_streams,
    mix_streams=streams.mix_streams,
    write_back_streams=streams.write_back_streams,
    gate_engram=engram.gate_engram,
    score_entries=index_scores.score_entries,
    score_candidates=index_scores.score_candidates,
    select_topk=selection.select_topk,
    select_candidate_blocks=selection.select_candidate_blocks,
    topk_of_candidates=selection.topk_of_candidates,
    sparse_attention=sparse_attention.sparse_attention,
)
