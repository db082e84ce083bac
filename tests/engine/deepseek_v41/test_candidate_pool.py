"""The candidate pool changes nothing while it holds everything; beyond, choices come from it."""

from __future__ import annotations

import pytest
import torch

from engine.models.deepseek_v41.config import LayerKind, plan_layers

from .model_bench import ModelBench, nano_bench

Seen = dict[tuple[str, int], torch.Tensor]


def run(bench: ModelBench, ids: list[int]) -> tuple[torch.Tensor, Seen]:
    seen: Seen = {}
    state = bench.begin(len(ids))
    logits = bench.run(state, ids, observe=lambda name, layer, t: seen.update({(name, layer): t}))
    bench.end(state)
    return logits, seen


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    generator = torch.Generator().manual_seed(21)
    return torch.randint(3, 300, (290,), generator=generator).tolist()


def test_pool_equals_full_search_while_everything_fits(token_ids: list[int]) -> None:
    bench = nano_bench()
    config = bench.model.config
    fits = config.candidate_blocks * config.candidate_block_entries
    assert fits < len(token_ids), "the prompt must outgrow the pool"
    wide = nano_bench(candidate_blocks=4 * config.candidate_blocks)
    logits, seen = run(bench, token_ids)
    wide_logits, wide_seen = run(wide, token_ids)
    assert torch.equal(logits[:fits], wide_logits[:fits])
    for role in plan_layers(config):
        if role.kind is LayerKind.REINDEX:
            topk = seen["topk", role.index]
            assert torch.equal(topk[:fits], wide_seen["topk", role.index][:fits])
            assert not torch.equal(topk[fits:], wide_seen["topk", role.index][fits:])


def test_choices_beyond_come_from_the_pool_and_the_newest_block_is_in_it(
    token_ids: list[int],
) -> None:
    bench = nano_bench()
    config = bench.model.config
    _, seen = run(bench, token_ids)
    blocks_TB = seen["candidate_blocks", config.candidate_source_id]
    newest_T = torch.arange(len(token_ids)) // config.candidate_block_entries
    assert (blocks_TB == newest_T[:, None]).any(-1).all()
    for role in plan_layers(config):
        if role.kind is LayerKind.REINDEX:
            topk_TS = seen["topk", role.index]
            chosen_in = topk_TS // config.candidate_block_entries
            is_of_pool = (chosen_in[:, :, None] == blocks_TB[:, None, :]).any(-1)
            assert (is_of_pool | (topk_TS < 0)).all()
            full = (topk_TS >= 0).sum(-1)
            visible = torch.arange(1, len(token_ids) + 1)
            assert torch.equal(full, visible.clamp(max=config.index_topk))


def test_source_of_the_pool_chooses_from_everything(token_ids: list[int]) -> None:
    bench = nano_bench()
    config = bench.model.config
    _, seen = run(bench, token_ids)
    source = config.candidate_source_id
    blocks_TB, topk_TS = seen["candidate_blocks", source], seen["topk", source]
    wide = nano_bench(candidate_blocks=4 * config.candidate_blocks)
    assert torch.equal(topk_TS, run(wide, token_ids)[1]["topk", source])
    assert len(blocks_TB[0]) < len(token_ids) // config.candidate_block_entries
