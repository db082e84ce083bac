"""The model computes what DeepSeek's own inference code computes (float32, cache quantisers on).

`noise` is how much a logits row moves when weights move by 1e-7, there or here (`borders`): rows
above `STABLE` lie beside a rounding or selection border, and only a bound in proportion can be
asked of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from engine.models.deepseek_v41.draft import Drafter

from .borders import STABLE
from .golden_model import GoldenModel

SEQUENCES = ("n1", "n2", "n7", "n15", "n16", "n17", "n33", "n65", "n129", "n320")


def assert_close(logits: torch.Tensor, golden: np.ndarray, noise: np.ndarray) -> None:
    difference = (logits - torch.from_numpy(golden)).abs().amax(dim=-1)
    allowed = torch.from_numpy(np.where(noise < STABLE, 1e-4, 3 * noise + 1e-4))
    assert (difference <= allowed).all(), (difference - allowed).max()


@pytest.mark.parametrize("name", SEQUENCES)
def test_logits_streams_and_choices_are_the_golden_ones(golden: GoldenModel, name: str) -> None:
    data = golden.sequences
    ids = data[f"ids_{name}"].tolist()
    bench = golden.bench()
    seen: dict[tuple[str, int], torch.Tensor] = {}
    state = bench.begin(len(ids))
    logits = bench.run(state, ids, observe=lambda n, layer, t: seen.update({(n, layer): t}))
    noise = golden.noise(name)
    assert_close(logits, data[f"logits_{name}"], noise)
    stable = torch.from_numpy(noise < STABLE)
    assert stable.float().mean() > 0.7
    check_choices(golden, name, seen, stable)
    if f"streams_{name}" in golden.internals:
        check_internals(golden, name, seen, stable)


def check_choices(
    golden: GoldenModel,
    name: str,
    seen: Mapping[tuple[str, int], torch.Tensor],
    stable: torch.Tensor,
) -> None:
    data = golden.sequences
    for layer, experts in enumerate(torch.from_numpy(data[f"experts_{name}"]).long()):
        assert torch.equal(seen["experts", layer][stable], experts[stable].sort(dim=-1).values)
    for layer in golden.config.index_source_ids:
        if f"topk_{name}_L{layer}" in data:
            topk = torch.from_numpy(data[f"topk_{name}_L{layer}"]).long()
            assert torch.equal(seen["topk", layer][stable], topk[stable]), layer
    blocks = torch.from_numpy(data[f"candidate_blocks_{name}"]).long()
    assert torch.equal(
        seen["candidate_blocks", golden.config.candidate_source_id][stable], blocks[stable]
    )
    for table, layer in enumerate(golden.engram_layers):
        rows = torch.from_numpy(data[f"engram_rows_{name}"][:, table]).long()
        assert torch.equal(seen["engram_rows", layer], rows)


def check_internals(
    golden: GoldenModel,
    name: str,
    seen: Mapping[tuple[str, int], torch.Tensor],
    stable: torch.Tensor,
) -> None:
    data = golden.internals
    positions = torch.from_numpy(data[f"pos_{name}"]).long()
    kept = stable[positions]

    def check(what: str, layer: int, expected: np.ndarray, tolerance: float = 1e-4) -> None:
        given = seen[what, layer][positions][kept]
        wanted = torch.from_numpy(expected)[kept]
        assert given.shape == wanted.shape, what
        assert (given - wanted).abs().max() <= tolerance, (what, layer)

    for layer in range(golden.config.layers):
        check("streams", layer, data[f"streams_{name}"][layer])
        for what in ("attn_in", "attn_out", "ffn_in", "ffn_out", "ffn_pre"):
            if f"{what}_{name}" in data:
                check(what, layer, data[f"{what}_{name}"][layer])
    for table, layer in enumerate(golden.engram_layers):
        check("engram_out", layer, data[f"engram_out_{name}"][table])
    check("final_hidden", golden.config.layers, data[f"final_hidden_{name}"])
    check("main_hidden", golden.config.layers, data[f"main_hidden_{name}"])


def test_image_tokens_are_masked_in_engram_and_routed_by_their_own_bias(
    golden: GoldenModel,
) -> None:
    data = golden.sequences
    is_image = torch.from_numpy(data["image_mask_img"].astype(bool))
    bench = golden.bench()
    state = bench.begin(len(is_image))
    seen: dict[tuple[str, int], torch.Tensor] = {}
    logits = bench.run(
        state,
        data["ids_img"].tolist(),
        is_image=is_image,
        observe=lambda n, layer, t: seen.update({(n, layer): t}),
    )
    assert_close(logits, data["logits_img"], data["noise_img"])
    for table, layer in enumerate(golden.engram_layers):
        rows = torch.from_numpy(data["engram_rows_img"][:, table]).long()
        assert torch.equal(seen["engram_rows", layer], rows)


def test_cache_rows_hold_the_golden_numbers(golden: GoldenModel) -> None:
    """SWA rows, main entries and index keys of n33 as read back from the bytes."""
    data = golden.internals
    ids = golden.sequences["ids_n33"].tolist()
    bench = golden.bench()
    state = bench.begin(len(ids))
    bench.run(state, ids)
    operations, blocks = bench.model.operations, bench.model.blocks
    first = len(ids) - golden.config.ring_rows
    for layer in range(golden.config.layers):
        rows = state.read_window_rows(layer, first, len(ids))
        values = operations.dequantise_window_rows(rows, torch.float32)
        assert_equal_codes(values, data["swa_post_n33"][layer][first:])
    block_ids = torch.tensor(state.block_ids)
    for owner in golden.config.kv_source_ids:
        expected = data[f"ckv_post_n33_L{owner}"]
        groups = torch.arange(len(expected))
        main = blocks.main_entries(owner, block_ids).read(groups)
        assert_equal_codes(operations.dequantise_main_entries(main, torch.float32), expected)
        keys = blocks.index_keys(owner, block_ids)
        key = operations.dequantise_index_entries(
            keys.data.read(groups), keys.scales.read(groups), torch.float32
        )
        assert_equal_codes(key, data[f"ik_post_n33_L{owner}"])


def assert_equal_codes(values: torch.Tensor, expected: np.ndarray) -> None:
    """Equal but for codes that sat on a rounding border: those are few, and a step away."""
    wanted = torch.from_numpy(expected)
    differs = (values != wanted).float().mean()
    assert differs <= 2e-3, differs


@pytest.mark.parametrize("keep", [22, 32])
def test_decoder_tail_is_the_golden_one(golden: GoldenModel, keep: int) -> None:
    """Of DeepInfer's cut: from the first decoder layer on, its own window included."""
    ids = golden.sequences["ids_n320"].tolist()
    bench = golden.bench()
    logits = bench.run(bench.begin(len(ids)), ids, decoder_first=len(ids) - keep)
    noise = golden.extra[f"derived_noise_tail_k{keep}"]
    assert_close(logits, golden.extra[f"derived_logits_tail_k{keep}"], noise)


@pytest.mark.parametrize("cuts", [(), (7, 9, 3)])
def test_hit_with_replay_is_the_golden_one(golden: GoldenModel, cuts: tuple[int, ...]) -> None:
    """Blocks of an undisturbed run up to H; the encoder's windows are rebuilt from s on."""
    start, hit = golden.extra["derived_replay_s_H"].tolist()
    ids = golden.sequences["ids_n320"].tolist()
    bench = golden.bench()
    donor = bench.begin(len(ids))
    bench.run(donor, ids[:hit])
    blocks = bench.blocks.memory[donor.block_ids].clone()
    state = bench.states.allocate()
    state.block_ids = donor.block_ids
    state.start_at(start, bench.model.recent_ids_of(ids[:start]))
    keep = 22
    logits = bench.run(state, ids[start:], cuts, entries_first=hit, decoder_first=len(ids) - keep)
    noise = golden.extra[f"derived_noise_replay_tail_k{keep}"]
    assert_close(logits, golden.extra[f"derived_logits_replay_tail_k{keep}"], noise)
    # Nothing below the hit was written again.
    after = bench.blocks.memory[donor.block_ids]
    for owner in bench.model.blocks.owners.values():
        for run in (owner.index_data, owner.index_scales, owner.main):
            kept = (hit // owner.ratio) * run.row_bytes
            was = blocks[:, run.offset : run.end].reshape(-1)[:kept]
            assert torch.equal(after[:, run.offset : run.end].reshape(-1)[:kept], was)


def test_drafts_are_the_golden_ones(golden: GoldenModel) -> None:
    extra = golden.extra
    ids = golden.sequences["ids_n320"].tolist()
    prompt = int(extra["dspark_prompt_len"][0])
    bench = golden.bench()
    state = bench.begin(len(ids) + 8)
    bench.run(state, ids[:prompt])
    drafter = Drafter(bench.model)
    for step, position in enumerate(extra["dspark_pos"].tolist()):
        logits = bench.run(state, [ids[position]])
        golden_token = int(extra["dspark_golden_token"][step])
        noise = float(extra["dspark_noise"][step])
        if noise >= STABLE:
            continue
        assert int(logits[-1].argmax()) == golden_token
        draft = drafter.draft(state, golden_token)
        assert draft.token_ids.tolist() == extra["dspark_ids"][step][1:].tolist()
        wanted = torch.from_numpy(extra["dspark_logits"][step])
        assert (draft.logits - wanted).abs().max() <= 1e-4
        wanted = torch.from_numpy(extra["dspark_confidence_raw"][step])
        assert (draft.confidence - wanted).abs().max() <= 1e-4
