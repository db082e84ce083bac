"""The trainable model computes what DeepSeek's code and our engine compute, for whole sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.models.deepseek_v41.build_weights import build_weights
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.config_file import read_config
from engine.models.deepseek_v41.draft import Drafter
from tests.engine.deepseek_v41.borders import Tensors, measure_noise
from tests.engine.deepseek_v41.model_bench import ModelBench
from tests.golden_folder import golden_folder
from training.batched_model import BatchedModel
from training.draft_model import DraftModel
from training.parameters import shapes_of, stack_experts, unstack_experts
from training.positions import Positions

from .nano_training import CPU, nano, random_ids

STABLE = 1e-5
"""Rows with less noise are beside no rounding or selection border (golden README)."""
TOLERANCE = 1e-4


class Golden:
    """DeepSeek's small model and what its own code computed."""

    def __init__(self) -> None:
        folder = golden_folder() / "v41"
        self.config: DeepseekV41Config = read_config(folder / "config.json")
        self.parameters = stack_experts(load_file(folder / "model.safetensors"))
        self.sequences = np.load(folder / "sequences.npz")
        self.extra = np.load(folder / "extra.npz")

    def positions(self, tokens: int) -> Positions:
        ids_V = torch.from_numpy(self.sequences["engram_token_map"])
        return Positions(self.config, tokens, CPU, ids_V)

    def ids(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.sequences[f"ids_{name}"]).long().unsqueeze(0)


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


@pytest.mark.parametrize("name", ["n1", "n7", "n33", "n65", "n129", "n320"])
@torch.no_grad()
def test_logits_are_those_of_deepseeks_own_code(golden: Golden, name: str) -> None:
    ids = golden.ids(name)
    model = BatchedModel(golden.config, golden.positions(ids.shape[1]))
    forward = model.forward(golden.parameters, ids)
    logits = model.logits(golden.parameters, forward.hidden_BTE)[0].numpy()
    noise = golden.sequences[f"noise_{name}"]
    difference = np.abs(logits - golden.sequences[f"logits_{name}"]).max(axis=1)
    allowed = np.where(noise <= STABLE, TOLERANCE, 3 * noise + TOLERANCE)
    assert (difference <= allowed).all(), (difference - allowed).max()


@torch.no_grad()
def test_sequences_of_a_batch_do_not_see_each_other(golden: Golden) -> None:
    both = torch.cat([golden.ids("n320")[:, :65], golden.ids("n65")])
    model = BatchedModel(golden.config, golden.positions(65))
    together = model.forward(golden.parameters, both).hidden_BTE
    alone = model.forward(golden.parameters, both[1:]).hidden_BTE
    assert torch.allclose(together[1], alone[0], atol=TOLERANCE)


@torch.no_grad()
def test_drafts_are_those_of_deepseeks_own_code(golden: Golden) -> None:
    ids, extra = golden.ids("n320"), golden.extra
    positions = golden.positions(ids.shape[1])
    targets = BatchedModel(golden.config, positions).forward(golden.parameters, ids).targets_BTF
    anchors = torch.from_numpy(extra["dspark_pos"]).long()
    assert np.abs(targets[0, anchors].numpy() - extra["dspark_main_hidden"]).max() <= TOLERANCE
    known = torch.from_numpy(extra["dspark_ids"][:, :-1]).long().unsqueeze(0)
    drafts = DraftModel(golden.config, positions).forward(
        golden.parameters, targets, anchors, known
    )
    difference = np.abs(drafts.logits[0].numpy() - extra["dspark_logits"]).max(axis=(1, 2))
    allowed = 3 * extra["dspark_noise"] + TOLERANCE
    assert (difference <= allowed).all(), difference
    stable = extra["dspark_noise"] <= STABLE
    assert stable.any()
    confidence = np.abs(drafts.confidence[0].numpy() - extra["dspark_confidence_raw"]).max(axis=1)
    assert (confidence[stable] <= TOLERANCE).all()


@pytest.mark.parametrize("tokens", [1, 33, 130])
@torch.no_grad()
def test_logits_are_those_of_the_engine(tokens: int) -> None:
    model = nano()
    ids = random_ids(model.config, 1, tokens)

    def run_engine(tensors: Tensors) -> torch.Tensor:
        weights = build_weights(model.config, tensors)
        bench = ModelBench.build(model.config, weights, model.compressed_ids_V)
        return bench.run(bench.begin(tokens), ids[0].tolist())

    expected = run_engine(model.tensors)
    batched = BatchedModel(model.config, model.positions(tokens))
    parameters = stack_experts(model.tensors)
    forward = batched.forward(parameters, ids)
    given = batched.logits(parameters, forward.hidden_BTE)[0]
    stable = measure_noise(run_engine, model.tensors, draws=3) <= STABLE
    assert stable.float().mean() > 0.8
    assert (given - expected)[stable].abs().max() <= TOLERANCE


@torch.no_grad()
def test_drafts_are_those_of_the_engine() -> None:
    model = nano()
    bench = ModelBench.build(
        model.config, build_weights(model.config, model.tensors), model.compressed_ids_V
    )
    ids = random_ids(model.config, 1, 60)
    anchors, drafts = [0, 14, 15, 16, 40], []
    for anchor in anchors:
        state = bench.begin(70)
        bench.run(state, ids[0, : anchor + 1].tolist())
        drafts.append(Drafter(bench.model).draft(state, int(ids[0, anchor + 1])))
        bench.end(state)
    known = [
        [int(ids[0, anchor + 1]), *draft.token_ids[:-1].tolist()]
        for anchor, draft in zip(anchors, drafts, strict=True)
    ]
    positions, parameters = model.positions(60), stack_experts(model.tensors)
    targets = BatchedModel(model.config, positions).forward(parameters, ids).targets_BTF
    given = DraftModel(model.config, positions).forward(
        parameters, targets, torch.tensor(anchors), torch.tensor([known])
    )
    for index, draft in enumerate(drafts):
        assert (given.logits[0, index] - draft.logits).abs().max() <= TOLERANCE
        assert (given.confidence[0, index] - draft.confidence).abs().max() <= TOLERANCE


def test_parameters_are_a_checkpoints_tensors_with_experts_stacked() -> None:
    model = nano()
    stacked = stack_experts(model.tensors)
    assert {name: tuple(t.shape) for name, t in stacked.items()} == shapes_of(model.config)
    back = unstack_experts(stacked)
    assert back.keys() == model.tensors.keys()
    assert all(torch.equal(back[name], t.float()) for name, t in model.tensors.items())
