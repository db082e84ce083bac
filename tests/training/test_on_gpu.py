"""What only a CUDA device runs: the Sinkhorn kernel, and steps that are captured into a graph."""

from __future__ import annotations

import pytest
import torch

from training.positions import Positions
from training.residual_streams import _sinkhorn_backward, sinkhorn
from training.steps import WARM_UP_RUNS, Geometry, Runner, TargetStep

from .nano_training import nano, random_ids

pytestmark = pytest.mark.gpu


def test_sinkhorn_kernel_gives_what_the_plain_iterations_give() -> None:
    generator = torch.Generator().manual_seed(5)
    start = torch.rand(1_001, 4, 4, generator=generator).add_(0.01)
    grad = torch.randn(start.shape, generator=generator)
    on_device = start.cuda().requires_grad_()
    out = sinkhorn(on_device, iterations=20, eps=1e-6)
    assert torch.allclose(out.cpu(), sinkhorn(start, iterations=20, eps=1e-6), atol=1e-6)
    (given,) = torch.autograd.grad(out, on_device, grad.cuda())
    assert torch.allclose(given.cpu(), _sinkhorn_backward(start, grad, 20, 1e-6), atol=1e-5)


def test_captured_steps_train_as_those_call_by_call() -> None:
    model, device = nano(), torch.device("cuda")
    losses: list[list[float]] = []
    for captures in (False, True):
        parameters = {
            name: tensor.detach().to(device).requires_grad_()
            for name, tensor in model.parameters().items()
        }
        positions = Positions(model.config, 96, device, model.compressed_ids_V)
        step = TargetStep(Geometry(config=model.config, positions=positions, batch=2), parameters)
        runner = Runner(step.run, captures=captures)
        generator = torch.Generator().manual_seed(0)
        losses.append([])
        for seed in range(WARM_UP_RUNS + 4):
            step.optimiser.set_rate(0.1)
            step.prepare(random_ids(model.config, 2, 97, seed=seed % 2), generator)
            losses[-1].append(runner()[0].item())
    eager, captured = losses
    assert captured == pytest.approx(eager, abs=0.05)
    assert captured[-1] < captured[0] - 0.1
