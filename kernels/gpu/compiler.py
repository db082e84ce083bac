"""Compiles TileLang programs and says how they are called.

An operation is a function that makes a program from its static sizes (those that addresses are
computed with; counts of rows stay symbolic). `launcher` compiles it for a device once a process;
`lower_to_cuda` stops at the CUDA source and needs no device.

TileLang keeps compiled kernels in ~/.tilelang/cache, or in the folder that TILELANG_CACHE_DIR names
(TILELANG_DISABLE_CACHE=1: nowhere), so that only the first process runs nvcc. Files are published
there by a rename: processes may share the folder without a lock. Nothing is ever deleted from it;
it grows by about 130 KB for each program and set of sizes that is ever asked for.

Not for choosing between a kernel and a reference: that is the caller's.
"""

import logging
from collections.abc import Callable, Hashable
from functools import lru_cache
from threading import Lock
from typing import Any

import tilelang
import torch
from tilelang import tvm
from tilelang.contrib.nvcc import get_target_arch

Program = Any
"""A TileLang program: what a function decorated with `T.prim_func` becomes."""

Launcher = Callable[..., None]
"""Starts a kernel: tensors and numbers in the order of the program's parameters, by position.

It writes its outputs into tensors that are handed in, and works on the current stream of PyTorch on
the device of the first tensor. The call returns when the kernel is queued. It checks types, shapes,
strides and devices itself (in C), but its errors name the program's parameters: a caller's own
checks come first.
"""

KERNELS_MAX = 256
"""Launchers a process keeps; beyond, the one used longest ago is compiled again when called for."""

EXACT_FLAGS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Of nvcc: no contraction into fused multiply-adds, no flush to zero, IEEE division. Kernels here
give the bits of their references, and none of them is bound by arithmetic."""

_looking_up, _compiling = Lock(), Lock()

# TileLang writes what it logs to stdout, where commands print their answers and their JSON.
_log = logging.getLogger("tilelang")
_log.handlers.clear()
_log.propagate = True


class NoCudaDevice(RuntimeError):
    """A kernel was to be compiled to run, and there is no CUDA device."""


def launcher(
    make_program: Callable[..., Program], *sizes: Hashable, device_index: int = 0
) -> Launcher:
    """The kernel of `make_program(*sizes)`, compiled for a device; the same one at the next call.

    `make_program` is a function of a module (it is the key, with the sizes). The first call takes
    about 4 s (nvcc), or 0.2 s where an earlier process left the kernel in the cache folder; a later
    one a dictionary look-up. Threads that ask meanwhile wait for the one that compiles. Raises
    NoCudaDevice.
    """
    with _looking_up:
        kernel = _kernel_of(make_program, *sizes, device_index=device_index)
    if kernel.launch is None:
        with _compiling:
            if kernel.launch is None:
                kernel.launch = _compile(make_program, *sizes, device_index=device_index)
    return kernel.launch


class _Kernel:
    """One that is compiled, or is to be."""

    launch: Launcher | None = None


@lru_cache(maxsize=KERNELS_MAX)
def _kernel_of(
    make_program: Callable[..., Program], *sizes: Hashable, device_index: int
) -> _Kernel:
    # The cache alone would have two threads that miss at one time make two of them.
    return _Kernel()


def _compile(make_program: Callable[..., Program], *sizes: Hashable, device_index: int) -> Launcher:
    if not torch.cuda.is_available():
        raise NoCudaDevice(
            f"{make_program.__name__}: given no CUDA device, expected one to run on; "
            "kernels.reference has the same operation for any device"
        )
    arch = f"sm_{get_target_arch(torch.cuda.get_device_capability(device_index))}"
    kernel = tilelang.compile(
        make_program(*sizes),
        target={"kind": "cuda", "arch": arch},
        compile_flags=list(EXACT_FLAGS),
    )
    # The function behind the kernel, without TileLang's wrapper in Python: that one looks for
    # outputs to allocate in every call.
    return kernel.adapter.get_exportable_executable()["main"]


def lower_to_cuda(program: Program, arch: str) -> str:
    """CUDA source of a program's kernels for an architecture such as "sm_90a" or "sm_100".

    Needs neither a device nor nvcc.
    """
    configs = program.attrs.get("tilelang_pass_configs") if program.attrs else None
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with tvm.transform.PassContext(opt_level=3, config=dict(configs or {})), target:
        return tilelang.lower(program, target=target).kernel_source
