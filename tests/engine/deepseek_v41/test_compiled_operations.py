"""The forward with compiled kernels for the bytes of cache rows is the forward without them.

On a CPU the reference stands in for each compiled kernel, where it is called: what is seen is that
every row goes through one, in the right shapes. What a kernel computes is tested in
tests/kernels/gpu; on a GPU all of it is compared once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.cuda.operations import CUDA_OPERATIONS
from kernels.gpu import index_entries, main_entries, quantised_rows, window_rows
from kernels.gpu.operations import COMPILED_OPERATIONS, compile_ahead
from kernels.gpu.quantised_rows import RowFormat, RowLayout
from kernels.reference import index_entries as reference_index
from kernels.reference import main_entries as reference_main
from kernels.reference import window_rows as reference_window

from .model_bench import ModelBench, nano_bench

pytestmark = pytest.mark.timeout(240)

QUANTISE: dict[object, Callable[..., Any]] = {
    main_entries.FORMAT: reference_main.quantise_main_entries,
    index_entries.FORMAT: reference_index.quantise_index_entries,
    window_rows.FORMAT: reference_window.quantise_window_rows,
}
DEQUANTISE: dict[object, Callable[..., torch.Tensor]] = {
    main_entries.FORMAT: reference_main.dequantise_main_entries,
    index_entries.FORMAT: reference_index.dequantise_index_entries,
    window_rows.FORMAT: reference_window.dequantise_window_rows,
}
CUTS = [150, 1, 40]


class StandIn:
    """The reference in the place of `kernels.gpu.compiler.launcher`, and in no other place.

    `asked`: the kernels that were called.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: set[tuple[object, ...]] = set()
        self._is_running = False
        monkeypatch.setattr(quantised_rows, "launcher", self.launcher)
        for module in (index_entries, main_entries, quantised_rows, window_rows):
            monkeypatch.setattr(module, "check_device", lambda name, tensor: None)
        for reference in (reference_index, reference_main, reference_window):
            for name in ("_encode", "_decode"):
                monkeypatch.setattr(reference, name, self._guard(getattr(reference, name)))

    def launcher(
        self,
        make_program: Callable[..., object],
        row_format: RowFormat,
        layout: RowLayout,
        is_short: bool,
        *,
        device_index: int,
    ) -> Callable[..., None]:
        self.asked.add((make_program, row_format, layout))
        assert not is_short, "all numbers of a pass are float32"
        quantises = make_program is quantised_rows.quantise_program
        has_scales_apart = layout.scales_start == 0

        def call(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> None:
            self._is_running = True
            if not quantises:
                parts = (first, second) if has_scales_apart else (first,)
                third.copy_(DEQUANTISE[row_format](*parts))
            elif has_scales_apart:
                data, scales = QUANTISE[row_format](first.view(torch.float32))
                second.copy_(data)
                third.copy_(scales)
            else:
                assert second.data_ptr() == third.data_ptr()
                second.copy_(QUANTISE[row_format](first.view(torch.float32)))
            self._is_running = False

        return call

    def _guard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any) -> Any:  # noqa: ANN401
            assert self._is_running, f"{original.__module__} is used beside the kernels"
            return original(*arguments)

        return guarded


def run(bench: ModelBench) -> tuple[torch.Tensor, ...]:
    """Logits, blocks and slot of a sequence, on the host."""
    token_ids = torch.randint(3, 380, (230,), generator=torch.Generator().manual_seed(3)).tolist()
    state = bench.begin(len(token_ids))
    logits = bench.run(state, token_ids, CUTS)
    found = (logits, *bench.cache_bytes(state))
    bench.end(state)
    return tuple(x.cpu() for x in found)


def test_every_row_of_a_pass_goes_through_a_kernel_that_was_compiled_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run(nano_bench(operations=CUDA_OPERATIONS))
    bench = nano_bench(operations=COMPILED_OPERATIONS)
    stand_in = StandIn(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    config = bench.model.config
    compile_ahead(
        torch.device("cpu"), entry_channels=config.head_dim, index_channels=config.index_dim
    )
    ahead = set(stand_in.asked)
    assert len(ahead) == 6
    stand_in.asked.clear()
    for found, right in zip(run(bench), expected, strict=True):
        assert torch.equal(found, right)
    assert stand_in.asked == ahead


@pytest.mark.gpu
def test_forward_has_the_same_bits_with_and_without_compiled_kernels() -> None:
    plain, compiled = (
        run(nano_bench(device="cuda", operations=operations))
        for operations in (CUDA_OPERATIONS, COMPILED_OPERATIONS)
    )
    for found, expected in zip(compiled, plain, strict=True):
        assert torch.equal(found, expected)
