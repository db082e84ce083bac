"""Runs the CUDA source that a TileLang program is lowered to, on the CPU.

The source is compiled by g++ behind a few definitions that stand for CUDA's. The threads of a block
run one after the other, or, if those of a warp exchange values, by turns from one exchange to the
next; a kernel with barriers for a whole block cannot be run this way. What is shown is the
generated source's arithmetic and addresses, not its speed.
"""

import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.gpu.compiler import Program, lower_to_cuda
from tests.kernels.gpu.cuda_numbers import NUMBERS

ARCHITECTURES = ("sm_90a", "sm_100")
"""What every kernel is lowered for."""

DEFINITIONS = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
struct dim3_ { int x, y, z; };
static dim3_ gridDim;
static dim3_ blockIdx, threadIdx;
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { uint x, y; };
struct alignas(16) uint4 { uint x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(uint x, uint y) { return {x, y}; }
static inline uint4 make_uint4(uint x, uint y, uint z, uint w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int __float_as_int(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
static inline uint __float_as_uint(float x) { uint bits; memcpy(&bits, &x, 4); return bits; }
static inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline float __uint_as_float(uint bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline void __trap() { abort(); }
namespace tl {
template <typename Vector, typename Item> Vector broadcast(Item item) {
  Vector vector;
  for (size_t at = 0; at < sizeof(Vector); at += sizeof(Item))
    memcpy((char*)&vector + at, &item, sizeof(Item));
  return vector;
}
}
using std::max;
using std::min;
"""

EXCHANGE = """
#include <ucontext.h>
static ucontext_t scheduler, fibers[1024];
static uint64_t exchanged[1024];
static bool is_done[1024];
static int running;
static void* body;
template <class T> static T __shfl_xor_sync(uint, T value, int distance, int) {
  const int thread = running;
  exchanged[thread] = (uint64_t)value;
  swapcontext(&fibers[thread], &scheduler);
  const T found = (T)exchanged[thread ^ distance];
  swapcontext(&fibers[thread], &scheduler);
  return found;
}
template <class Body> static void run_body() {
  (*(Body*)body)();
  is_done[running] = true;
}
template <class Body> static void run_together(Body thread_body, int threads) {
  static char stacks[1024][1 << 15];
  body = &thread_body;
  for (int at = 0; at < threads; ++at) {
    getcontext(&fibers[at]);
    fibers[at].uc_stack.ss_sp = stacks[at];
    fibers[at].uc_stack.ss_size = sizeof stacks[at];
    fibers[at].uc_link = &scheduler;
    is_done[at] = false;
    makecontext(&fibers[at], run_body<Body>, 0);
  }
  for (int left = threads; left > 0;)
    for (running = 0; running < threads; ++running)
      if (!is_done[running]) {
        threadIdx = {running, 0, 0};
        swapcontext(&scheduler, &fibers[running]);
        left -= is_done[running];
      }
}
"""
"""For kernels in which whole warps exchange values: each thread runs up to its next exchange."""

FLAGS = (
    "-std=c++20",
    "-O1",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-w",
)

SIGNATURE = re.compile(
    r'extern "C" __global__ void __launch_bounds__\((?P<threads>\d+), \d+\) (?P<name>\w+)'
    r"\((?P<parameters>[^)]*)\) \{"
)

SCALARS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint": ctypes.c_uint,
    "float": ctypes.c_float,
}


def run_on_cpu(program: Program, grid: tuple[int, ...], /, **arguments: torch.Tensor | int) -> None:
    """Run the program's one kernel over `grid` blocks of threads; tensors are written in place.

    `arguments` are the kernel's by name: the program's, and the sizes that it has as symbols.
    """
    kernel = _load(_lower(program))
    given = []
    for type_name, name in kernel.parameters:
        value = arguments[name]
        if isinstance(value, torch.Tensor):
            assert value.is_contiguous(), (name, value.stride())
            given.append(ctypes.c_void_p(value.data_ptr()))
        else:
            given.append(SCALARS[type_name](value))
    kernel.function(*[*grid, 1, 1][:3], *given)


@cache
def _lower(program: Program) -> str:
    return lower_to_cuda(program, ARCHITECTURES[0])


class _Kernel:
    def __init__(self, library: Path, parameters: list[tuple[str, str]]) -> None:
        self.parameters = parameters
        self.function = ctypes.CDLL(str(library)).run_on_cpu


@cache
def _load(source: str) -> _Kernel:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the generated source with")
    match = SIGNATURE.search(source)
    assert match is not None, source
    assert "__syncthreads" not in source, (
        "threads that wait for each other cannot be run one by one"
    )
    parameters = [_split(text) for text in match["parameters"].split(",")]
    body = "\n".join(line for line in source.splitlines() if not line.startswith("#include"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cpp")
        has_exchange = "__shfl_xor_sync" in body
        body = (EXCHANGE if has_exchange else "") + body
        entry = _entry(match, parameters, has_exchange)
        file.write_text(DEFINITIONS + NUMBERS + body + entry, encoding="utf-8")
        library = file.with_suffix(".so")
        command = [compiler, *FLAGS, str(file), "-o", str(library)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stderr
        return _Kernel(library, parameters)


def _split(parameter: str) -> tuple[str, str]:
    """Type and name: "const int64_t* __restrict__ ids" is ("pointer", "ids")."""
    type_name, name = parameter.replace("__restrict__", "").rsplit(None, 1)
    return ("pointer" if "*" in type_name else type_name.strip()), name


def _entry(match: re.Match[str], parameters: list[tuple[str, str]], has_exchange: bool) -> str:
    call = f"{match['name']}({', '.join(name for _, name in parameters)});"
    threads = match["threads"]
    one_by_one = f"for (threadIdx.x = 0; threadIdx.x < {threads}; ++threadIdx.x) {call}"
    together = f"run_together([&] {{ {call} }}, {threads});"
    return f"""
extern "C" void run_on_cpu(int grid_x, int grid_y, int grid_z, {match["parameters"]}) {{
  gridDim = {{grid_x, grid_y, grid_z}};
  for (blockIdx.z = 0; blockIdx.z < grid_z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x)
        {together if has_exchange else one_by_one}
}}
"""
