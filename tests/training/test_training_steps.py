"""Steps train every tensor, lower the loss, and leave a state that goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.models.deepseek_v41.checkpoint.folder import load_weights
from engine.models.deepseek_v41.checkpoint.tensor_schema import tensor_schema
from tests.engine.deepseek_v41.model_bench import ModelBench
from training.batched_feed_forward import balance_experts
from training.batched_model import BatchedModel
from training.batches import TokenStream
from training.curve import draw, plan_panels
from training.export import export_model, read_parameters
from training.masked_selection import mark_pool, mark_topk, mark_visible
from training.mini_config import PARAMETERS_MAX, mini_config
from training.optimiser import Optimiser, learning_rate_factor, orthogonalise
from training.parameters import (
    count_parameters,
    initialise,
    names_of_draft,
    names_of_target,
    storages_of,
)
from training.rounding import round_weights
from training.steps import DraftStep, TargetStep
from training.training_log import read_log
from training.training_run import Settings, Training

from .nano_training import Nano, nano, random_ids

BATCH, TOKENS = 2, 96


@pytest.fixture(scope="module")
def model() -> Nano:
    return nano()


def test_every_parameter_is_of_the_model_of_the_drafts_or_a_router_bias(model: Nano) -> None:
    parameters = model.parameters()
    target, draft = names_of_target(parameters), names_of_draft(parameters)
    biases = {name for name in parameters if name.endswith((".gate.bias", ".gate.bias_vl"))}
    assert sorted([*target, *draft, *biases]) == sorted(parameters)


def test_step_of_the_model_gives_every_tensor_of_it_a_gradient(model: Nano) -> None:
    parameters = model.parameters()
    step = TargetStep(model.geometry(BATCH, TOKENS), parameters)
    generator = torch.Generator().manual_seed(0)
    step.prepare(random_ids(model.config, BATCH, TOKENS + 1), generator)
    step.optimiser.set_rate(0.0)
    step.run()
    without = [name for name, tensor in step.trained.items() if not has_gradient(tensor)]
    assert without == []
    assert all(parameters[name].grad is None for name in names_of_draft(parameters))


def test_step_of_the_drafts_gives_every_tensor_of_them_a_gradient(model: Nano) -> None:
    parameters = model.parameters()
    step = DraftStep(model.geometry(BATCH, TOKENS), parameters)
    generator = torch.Generator().manual_seed(0)
    step.prepare(random_ids(model.config, BATCH, TOKENS + 1), generator)
    step.optimiser.set_rate(0.0)
    step.run()
    without = [name for name, tensor in step.trained.items() if not has_gradient(tensor)]
    assert without == []
    assert all(parameters[name].grad is None for name in names_of_target(parameters))


def has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.grad is not None and bool((tensor.grad != 0).any())


@pytest.fixture(scope="module")
def trained(model: Nano, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps of both parts on text that is easy to learn."""
    out = tmp_path_factory.mktemp("run")
    start_run(model, out, steps=10).run()
    return out


def start_run(
    model: Nano,
    out: Path,
    *,
    steps: int,
    target_minutes: float = 60,
    draft_minutes: float = 60,
    validate_every_s: float = 1e9,
    ticks: int = 10**9,
) -> Training:
    """`ticks`: how often the clock answers before it breaks the run off."""
    ids = random_ids(model.config, 1, 150)[0].repeat(20)
    stream = TokenStream(ids, text_bytes=3 * len(ids))
    settings = Settings(
        seed=1,
        batch=BATCH,
        tokens=TOKENS,
        target_minutes=target_minutes,
        draft_minutes=draft_minutes,
        steps=steps,
        log_every=2,
        validate_every_s=validate_every_s,
        validation_windows=2,
        captures=False,
        dropout=0.1,
    )
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(2)
    parameters = initialise(model.config, generator)
    for parameter in parameters.values():
        parameter.requires_grad_()
    geometry = model.geometry(BATCH, TOKENS)
    clock = iter(range(ticks))
    return Training(
        settings, geometry, parameters, (stream, stream), out, lambda: float(next(clock))
    )


def test_run_lowers_the_losses_of_both_parts(trained: Path) -> None:
    records = list(read_log(trained / "log.jsonl"))
    for part, loss in (("target", "loss"), ("draft", "variation")):
        losses = [r[loss] for r in records if r["part"] == part and r["kind"] == "step"]
        assert len(losses) == 5
        assert losses[-1] < losses[0] - 0.02, (part, losses)
    kinds = [(r["part"], r["kind"]) for r in records]
    assert kinds.count(("target", "validation")) == kinds.count(("draft", "validation")) == 1
    assert json.loads((trained / "log.jsonl").read_text().splitlines()[0])["part"] == "run"


def test_run_goes_on_where_it_stopped(model: Nano, trained: Path) -> None:
    log_size = (trained / "log.jsonl").stat().st_size
    training = start_run(model, trained, steps=10)
    training.resume()
    training.run()
    lines = (trained / "log.jsonl").read_text()[log_size:].splitlines()
    # Both parts were finished: all that is new is the line about the settings.
    assert [json.loads(line)["kind"] for line in lines] == ["settings"]


def test_run_that_was_broken_off_ends_as_one_that_was_not(model: Nano, tmp_path: Path) -> None:
    start_run(model, tmp_path / "whole", steps=4, draft_minutes=0).run()
    broken = start_run(
        model, tmp_path / "broken", steps=4, draft_minutes=0, validate_every_s=0, ticks=3
    )
    with pytest.raises(StopIteration):
        broken.run()
    again = start_run(model, tmp_path / "broken", steps=4, draft_minutes=0)
    again.resume()
    again.run()
    states = [
        torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("whole", "broken")
    ]
    assert [state["progress"]["target"]["step"] for state in states] == [4, 4]
    for name, parameter in states[0]["parameters"].items():
        assert torch.equal(parameter, states[1]["parameters"][name]), name


def test_rate_rises_from_the_second_step_on(model: Nano, tmp_path: Path) -> None:
    # The rate hangs on the clock, which was read at log records only: up to the first one the rate
    # was 0 and the steps were for nothing.
    start_run(model, tmp_path, steps=0, target_minutes=0.05, draft_minutes=0).run()
    steps = [r for r in read_log(tmp_path / "log.jsonl") if r["kind"] == "step"]
    assert steps[0]["step"] == 2
    assert steps[0]["rate"] > 0


def test_part_that_was_broken_off_is_left_when_the_other_one_goes_on(
    model: Nano, tmp_path: Path
) -> None:
    broken = start_run(model, tmp_path, steps=4, draft_minutes=0, validate_every_s=0, ticks=3)
    with pytest.raises(StopIteration):
        broken.run()
    again = start_run(model, tmp_path, steps=2, target_minutes=0)
    again.resume()
    again.run()
    progress = torch.load(tmp_path / "state.pt", weights_only=True)["progress"]
    assert (progress["target"]["step"], progress["draft"]["step"]) == (2, 2)


def test_exported_folder_is_the_trained_model(model: Nano, trained: Path, tmp_path: Path) -> None:
    parameters = torch.load(trained / "state.pt", weights_only=True)["parameters"]
    export_model(model.config, parameters, tmp_path)
    config, weights = load_weights(tmp_path)
    assert config == model.config
    ids = random_ids(config, 1, 70)
    bench = ModelBench.build(config, weights, model.compressed_ids_V)
    expected = bench.run(bench.begin(70), ids[0].tolist())
    batched = BatchedModel(config, model.positions(70))
    stored = round_weights(parameters, storages_of(config))
    again = read_parameters(tmp_path, config)
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())
    given = batched.logits(stored, batched.forward(stored, ids).hidden_BTE)[0]
    assert (given - expected).abs().max() <= 1e-4


def test_curve_has_a_panel_for_everything_that_was_logged(trained: Path) -> None:
    panels = plan_panels(read_log(trained / "log.jsonl"))
    assert len(panels) == 4
    assert draw(panels).count("<polyline") == 5


def test_mini_config_keeps_the_bound_on_parameters() -> None:
    config = mini_config(compressed_vocabulary=2_048)
    assert count_parameters(config) == sum(
        torch.Size(spec.shape).numel() for spec in tensor_schema(config).values()
    )
    assert count_parameters(config) <= PARAMETERS_MAX


def test_topk_takes_the_lowest_position_first_among_equals() -> None:
    inf = float("inf")
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, -inf], [-inf, -inf, 1.0, -inf, -inf]])
    expected = [[True, True, True, False, False], [False, False, True, False, False]]
    assert mark_topk(scores, 3).tolist() == expected


def test_pool_holds_the_newest_block_and_the_best_of_the_others() -> None:
    is_visible = mark_visible(tokens=6, entries=6, ratio=1, device=torch.device("cpu"))
    scores = torch.tensor([5.0, 0.0, 1.0, 1.0, 9.0, 0.0]).expand(6, 6)
    pool = mark_pool(scores.masked_fill(~is_visible, float("-inf")), is_visible, 2, 2)
    assert pool[3].tolist() == [True, True, True, True, False, False]
    assert pool[5].tolist() == [True, True, False, False, True, True]


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in ((3, 32, 64), (3, 64, 32)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=generator)))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_matrices_go_against_their_orthogonalised_momentum_and_shrink() -> None:
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(64, 32, generator=generator)
    matrix = start.clone().requires_grad_()
    optimiser = Optimiser({"layers.0.attn.wkv.weight": matrix, "layers.0.attn_norm.weight": ones()})
    optimiser.set_rate(0.5)
    expected, momentum, rate = start.clone(), torch.zeros(64, 32), 0.5 * 0.02
    for _ in range(3):
        gradient = torch.randn(64, 32, generator=generator)
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalise(0.95 * momentum + 0.05 * gradient) * 2**0.5
        expected = expected * (1 - rate * 0.1) - rate * update
        matrix.grad = gradient
        optimiser.step()
    assert torch.allclose(matrix, expected, atol=1e-5)


def ones() -> torch.Tensor:
    return torch.ones(8).requires_grad_()


def test_bias_goes_down_for_experts_with_more_than_their_share() -> None:
    bias = torch.zeros(3)
    balance_experts(bias, torch.tensor([9.0, 3.0, 6.0]))
    assert bias.tolist() == pytest.approx([-0.001, 0.001, 0.0])


def test_learning_rate_rises_stays_and_ends_at_nothing() -> None:
    factors = [learning_rate_factor(share) for share in (0.0, 0.01, 0.2, 0.4, 0.7, 1.0)]
    assert factors[0] == 0.0
    assert 0 < factors[1] < 1
    assert factors[2] == factors[3] == 1.0
    assert 0 < factors[4] < 1
    assert factors[5] == 0.0
