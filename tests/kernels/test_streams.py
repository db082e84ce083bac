"""Residual streams: golden mixes and sites, the formulas in float64, Sinkhorn's sums of one."""

import pytest
import torch

from kernels.reference.streams import (
    StreamMix,
    collapse_streams,
    mix_streams,
    project_streams,
    write_back_streams,
)
from tests.kernels.golden_vectors import SOURCES, golden_vectors
from tests.kernels.row_invariance import check_row_invariance, normal, tiles_of

EPS = 1e-6
NORM_EPS = 1e-20
ROWS = 13
PARTS = ("pre", "post", "comb")


def exact_mix(
    m: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, iterations: int
) -> dict[str, torch.Tensor]:
    """One row in float64, entry by entry."""
    n = next(n for n in range(1, 20) if (2 + n) * n == len(m))
    m, base, scale = m.double(), base.double(), scale.double()
    raw = (m[2 * n :] * scale[2] + base[2 * n :]).view(n, n)
    comb = torch.softmax(raw, 1) + EPS
    for iteration in range(iterations):
        if iteration:
            for row in range(n):
                comb[row] /= comb[row].sum() + EPS
        for column in range(n):
            comb[:, column] /= comb[:, column].sum() + EPS
    return {
        "pre": torch.sigmoid(m[:n] * scale[0] + base[:n]) + EPS,
        "post": 2 * torch.sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n]),
        "comb": comb,
    }


def mix_inputs(n: int, spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = (2 + n) * n
    return normal(ROWS, width, spread=spread), normal(width, seed=1), normal(3, seed=2)


def parts_of(mix: StreamMix) -> tuple[torch.Tensor, ...]:
    return mix.pre, mix.post, mix.comb


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", ["hc4", "hc2", "hc4_it1", "hc4_it3"])
def test_mixes_are_the_golden_ones(source: str, case: str) -> None:
    golden = golden_vectors("streams", source)
    m, base, scale = (golden[f"{case}_{name}"] for name in ("m", "base", "scale"))
    mix = mix_streams(m, base, scale, int(golden[f"{case}_iters"]), EPS)
    for name in PARTS:
        assert (getattr(mix, name) - golden[f"{case}_{name}"]).abs().max() <= 2e-7, name


def test_site_is_the_golden_one() -> None:
    golden = golden_vectors("streams", "folder")
    x = golden["site_x"]
    m = project_streams(x, golden["site_fn"], NORM_EPS, tiles_of(torch.arange(len(x))))
    mix = mix_streams(m, golden["site_base"], golden["site_scale"], 20, EPS)
    for name in PARTS:
        assert torch.allclose(getattr(mix, name), golden[f"site_{name}"], rtol=0, atol=1e-6), name


@pytest.mark.parametrize("source", SOURCES)
def test_collapse_and_write_back_are_the_golden_ones(source: str) -> None:
    golden = golden_vectors("streams", source)
    x = golden["site_x"]
    collapsed = collapse_streams(x, golden["site_lagged_pre"])
    assert torch.allclose(collapsed, golden["site_collapsed"], rtol=0, atol=1e-6)
    mix = StreamMix(*(golden[f"site_{name}"] for name in PARTS))
    written = write_back_streams(x, golden["site_y"], mix)
    assert torch.allclose(written, golden["site_out"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_mixes_are_those_of_the_formula(n: int, iterations: int, spread: float) -> None:
    m, base, scale = mix_inputs(n, spread)
    mix = mix_streams(m, base, scale, iterations, EPS)
    for row in range(ROWS):
        expected = exact_mix(m[row], base, scale, iterations)
        for name in PARTS:
            found = getattr(mix, name)[row].double()
            assert torch.allclose(found, expected[name], rtol=1e-5, atol=1e-7), (row, name)


@pytest.mark.parametrize("n", [2, 4])
def test_columns_sum_to_one_and_rows_nearly(n: int) -> None:
    comb = mix_streams(*mix_inputs(n, 0.3), 20, EPS).comb
    assert torch.allclose(comb.sum(-2), torch.ones(ROWS, n), atol=1e-5)
    assert torch.allclose(comb.sum(-1), torch.ones(ROWS, n), atol=1e-3)
    assert (comb > 0).all()


def test_projection_divides_by_the_root_mean_square_of_all_streams() -> None:
    x, projection = normal(ROWS, 4, 32, spread=7), normal(24, 128, seed=1)
    m = project_streams(x, projection, NORM_EPS, tiles_of(torch.arange(ROWS)))
    flat = x.double().flatten(1)
    expected = flat @ projection.double().T / flat.square().mean(1, keepdim=True).sqrt()
    assert torch.allclose(m.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_collapse_and_write_back_are_the_sums_of_the_formula(n: int) -> None:
    x, y = normal(ROWS, n, 24), normal(ROWS, 24, seed=1)
    pre, post = normal(ROWS, n, seed=2), normal(ROWS, n, seed=3)
    comb = normal(ROWS, n, n, seed=4)
    collapsed = torch.einsum("tn,tne->te", pre.double(), x.double())
    assert torch.allclose(collapse_streams(x, pre).double(), collapsed, rtol=0, atol=1e-5)
    written = torch.einsum("tk,te->tke", post.double(), y.double())
    written += torch.einsum("tjk,tje->tke", comb.double(), x.double())
    found = write_back_streams(x, y, StreamMix(pre, post, comb)).double()
    assert torch.allclose(found, written, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [2, 4, 5])
def test_bits_of_a_row_do_not_depend_on_the_others(n: int) -> None:
    _, base, scale = mix_inputs(n, 1)
    x, y = normal(ROWS, n, 24), normal(ROWS, 24, seed=5)
    projection = normal((2 + n) * n, n * 24, seed=6)

    def site(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        m = project_streams(x[rows], projection, NORM_EPS, tiles_of(rows))
        mix = mix_streams(m, base, scale, 20, EPS)
        written = write_back_streams(x[rows], y[rows], mix)
        return m, *parts_of(mix), collapse_streams(x[rows], mix.pre), written

    check_row_invariance(site, ROWS)


def test_several_dimensions_may_lead() -> None:
    m, base, scale = mix_inputs(4, 1)
    flat = parts_of(mix_streams(m[:12], base, scale, 20, EPS))
    for found, expected in zip(
        parts_of(mix_streams(m[:12].view(3, 4, -1), base, scale, 20, EPS)), flat, strict=True
    ):
        assert torch.equal(found.flatten(0, 1), expected)


def test_gradients_are_those_of_float64() -> None:
    m, base, scale = mix_inputs(4, 0.0)
    m += 0.5 * normal(ROWS, 24, seed=9) * (torch.arange(24) >= 4)

    def loss(m: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        parts = parts_of(mix_streams(m, base, scale, 5, EPS))
        directions = [normal(*part.shape, seed=part.dim()).to(part.dtype) for part in parts]
        return torch.stack(
            [(part * d).sum() for part, d in zip(parts, directions, strict=True)]
        ).sum()

    singles = [x.clone().requires_grad_() for x in (m, base, scale)]
    doubles = [x.double().requires_grad_() for x in (m, base, scale)]
    found = torch.autograd.grad(loss(*singles), singles)
    expected = torch.autograd.grad(loss(*doubles), doubles)
    assert torch.autograd.gradcheck(loss, doubles)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-3, atol=1e-5)


def test_width_that_fits_no_number_of_streams_is_refused() -> None:
    with pytest.raises(AssertionError, match="width 23"):
        mix_streams(torch.zeros(1, 23), torch.zeros(23), torch.ones(3), 2, EPS)
