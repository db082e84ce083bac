"""What a model is computed on: the last bits of a cache depend on it."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from engine.compute_device import (
    TF32_OVERRIDE,
    choose_device,
    name_arithmetic,
    operations_for,
    refuse_short_products,
)
from engine.errors import DeviceFull, DeviceLost, InvalidRequest
from engine.models.deepseek_v41.shipped import shipped_config
from kernels.cuda.operations import CUDA_OPERATIONS
from kernels.operations import REFERENCE, Operations

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CONFIG = shipped_config("v41-nano")
KERNELS = "kernels.gpu.operations"


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with an H200 and a release of PyTorch, as far as they are asked what they are."""
    card = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch, "__version__", "2.11.1+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return card


def test_arithmetic_of_a_cpu_is_named_by_its_type() -> None:
    assert name_arithmetic("bfloat16", CPU) == "bfloat16"


def test_arithmetic_of_a_gpu_is_named_by_card_and_releases(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name_arithmetic("float32", GPU), name_arithmetic("bfloat16", GPU)]
    assert names[0] == "float32 cuda sm90x132 torch2.11 cuda13.0"
    card.multi_processor_count = 114
    names.append(name_arithmetic("float32", GPU))
    card.major = 10
    names.append(name_arithmetic("float32", GPU))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    names.append(name_arithmetic("float32", GPU))
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    names.append(name_arithmetic("float32", GPU))
    assert len(set(names)) == len(names)
    # A release that only mends faults is no other one.
    monkeypatch.setattr(torch, "__version__", "2.12.3+cu129")
    assert name_arithmetic("float32", GPU) == names[-1]


@pytest.mark.parametrize("name", ["cuda:2", "cuda:256", "cuda:999"])
def test_number_beyond_the_devices_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device(known).index for known in ("cuda", "cuda:0", "cuda:1")] == [0, 0, 1]
    with pytest.raises(InvalidRequest, match=f"device: given '{name}'; 2 CUDA devices are there"):
        choose_device(name)


def test_full_products_are_taken() -> None:
    refuse_short_products(GPU, {})
    for value in ("0", "", "true"):  # PyTorch takes only "1" for a yes
        refuse_short_products(GPU, {TF32_OVERRIDE: value})
    refuse_short_products(CPU, {TF32_OVERRIDE: "1"})


@pytest.mark.parametrize("name", ["torch.backends.cuda.matmul", "torch.backends"])
def test_products_with_10_bits_are_refused(name: str) -> None:
    settings = torch.backends if name == "torch.backends" else torch.backends.cuda.matmul
    settings.fp32_precision = "tf32"  # type: ignore[union-attr]
    try:
        with pytest.raises(InvalidRequest, match=r"float32 products on a GPU: given tf32, by"):
            refuse_short_products(GPU, {})
    finally:
        settings.fp32_precision = "none"  # type: ignore[union-attr]


def test_products_with_10_bits_by_the_environment_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=f"given TF32, by {TF32_OVERRIDE}=1, expected full"):
        refuse_short_products(GPU, {TF32_OVERRIDE: "1"})


def test_cpu_runs_the_reference() -> None:
    assert operations_for(CPU, CONFIG) is REFERENCE


class Kernels(ModuleType):
    """In the place of `kernels.gpu.operations`, which needs a GPU to compile for."""

    COMPILED_OPERATIONS = Operations()

    def __init__(self, fault: Exception | None = None) -> None:
        super().__init__(KERNELS)
        self._fault = fault
        self.compiled: list[tuple[torch.device, int, int]] = []

    def compile_ahead(
        self, device: torch.device, *, entry_channels: int, index_channels: int
    ) -> None:
        self.compiled.append((device, entry_channels, index_channels))
        if self._fault is not None:
            raise self._fault


def test_gpu_runs_kernels_that_were_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    assert operations_for(GPU, CONFIG) is Kernels.COMPILED_OPERATIONS
    assert kernels.compiled == [(GPU, CONFIG.head_dim, CONFIG.index_dim)]


@pytest.mark.parametrize(
    "kernels",
    [
        None,
        Kernels(RuntimeError("Cannot find CUDA path")),
        Kernels(FileNotFoundError(2, "No such file or directory", "nvcc")),
    ],
    ids=["no TileLang", "no CUDA", "no compiler"],
)
def test_gpu_without_a_compiler_runs_plain_operations_and_says_so_once(
    kernels: Kernels | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    with caplog.at_level(logging.WARNING):
        assert operations_for(GPU, CONFIG) is CUDA_OPERATIONS
    (record,) = caplog.records
    assert "nvcc" in record.message
    assert "\n" not in record.message


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nand advice"), DeviceFull),
        (torch.AcceleratorError("CUDA error: unspecified launch failure\nand advice"), DeviceLost),
    ],
)
def test_gpu_that_is_full_or_lost_is_no_compiler_that_is_missing(
    fault: Exception,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, KERNELS, Kernels(fault))
    with pytest.raises(error, match=r"CUDA [^\n]*$"):
        operations_for(GPU, CONFIG)
    assert caplog.records == []
