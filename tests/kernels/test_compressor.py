"""Pooling of groups: the softmax average of each channel, whatever is computed beside it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference.compressor import compress_groups
from tests.kernels.golden_vectors import SOURCES, golden_vectors


def groups_of(*shape: int, seed: int = 0, spread: float = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate = torch.randn(shape, generator=generator) * spread
    return gate, torch.randn(shape, generator=generator)


def plain_average(gate: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(gate.double(), dim=-2) * content.double()).sum(-2)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("ratio", [2, 4])
def test_latents_are_the_golden_ones(source: str, ratio: int) -> None:
    golden = golden_vectors("compressor", source)
    latents = compress_groups(golden[f"r{ratio}_score"], golden[f"r{ratio}_content"])
    expected = golden[f"r{ratio}_out"]
    # They were rounded to BF16: half a unit in the last of its 8 places.
    assert latents.shape == expected.shape
    assert torch.allclose(latents, expected, rtol=2**-8, atol=1e-6)
    assert (latents.bfloat16() == expected).float().mean() > 0.99


@given(
    shape=st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(1, 9)),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.0, 1.0, 100.0, 1e6]),
)
def test_latent_is_the_softmax_average_of_each_channel(
    shape: tuple[int, int, int], seed: int, spread: float
) -> None:
    gate, content = groups_of(*shape, seed=seed, spread=spread)
    expected = plain_average(gate, content)
    assert torch.allclose(compress_groups(gate, content).double(), expected, rtol=1e-5, atol=1e-6)


def test_latent_is_the_content_when_there_is_no_gate() -> None:
    gate, content = groups_of(7, 1, 16)
    assert torch.equal(compress_groups(None, content), content[:, 0])
    assert torch.equal(compress_groups(gate, content), content[:, 0])


def test_groups_of_several_tokens_need_a_gate() -> None:
    with pytest.raises(AssertionError, match="gate"):
        compress_groups(None, torch.zeros(3, 2, 16))


def test_latent_is_one_token_when_its_gate_is_far_above() -> None:
    _, content = groups_of(5, 2, 16)
    gate = torch.tensor([-200.0, 200.0])[:, None].expand(5, 2, 16)
    assert torch.equal(compress_groups(gate, content), content[:, 1])


@pytest.mark.parametrize("channels", [1, 3, 16, 64, 100])
def test_group_keeps_its_bits_when_it_is_alone_or_in_any_chunk(channels: int) -> None:
    gate, content = groups_of(37, 2, channels)
    whole = compress_groups(gate, content)
    for size in (1, 2, 5, 36):
        parts = [
            compress_groups(gate[first : first + size], content[first : first + size])
            for first in range(0, 37, size)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_group_keeps_its_bits_when_inputs_are_strided_or_batched() -> None:
    gate, content = groups_of(12, 2, 16)
    whole = compress_groups(gate, content)
    # As a ring of rows [gate, content] hands them over, and as training does.
    both = torch.stack([gate, content], dim=2)
    assert torch.equal(compress_groups(both[:, :, 0], both[:, :, 1]), whole)
    batched = compress_groups(gate.view(3, 4, 2, 16), content.view(3, 4, 2, 16))
    assert torch.equal(batched.flatten(0, 1), whole)


def test_gradients_are_those_of_the_softmax_average() -> None:
    gate, content = (x.double().requires_grad_() for x in groups_of(4, 3, 5))
    torch.autograd.gradcheck(compress_groups, (gate, content))
    # Also where gates are equal, and the largest is therefore two.
    tied = torch.zeros(4, 2, 5, dtype=torch.double, requires_grad=True)
    content = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(1)).double()
    (given_gradient,) = torch.autograd.grad(compress_groups(tied, content).sum(), tied)
    (expected,) = torch.autograd.grad(plain_average(tied, content).sum(), tied)
    assert torch.allclose(given_gradient, expected)
