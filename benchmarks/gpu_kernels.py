"""The cache operations of `kernels.gpu` on this machine's card, each against a plain copy.

Prints JSON lines: one for the card, one for each copy, one for each operation and size (see
`gpu_roofline`); a case that fails gives a line with its error, and the others go on. The exit
status is 1 if one failed or gave another result than the reference.

    python -m benchmarks.gpu_kernels [--seconds 0.3] [--gib 4] [--only scatter] [--device cpu]

`--seconds` is for each figure; with the defaults all takes about two minutes, half of it nvcc's on
the first run. `--device cpu` runs the references, only to try this program out.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from .gpu_kernels_copies import copy_cases
from .gpu_kernels_erasure import erasure_cases
from .gpu_kernels_quantise import quantise_cases
from .gpu_roofline import Case, Copies, Workspace, measure

NVIDIA_SMI_DEADLINE_S = 20.0


def cases(device: torch.device) -> Iterator[Case]:
    yield from copy_cases(device)
    yield from quantise_cases()
    yield from erasure_cases()


def describe_card(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    described: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type != "cuda":
        return {"card": "none", **described}
    import tilelang

    properties = torch.cuda.get_device_properties(device)
    return {
        "card": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "tilelang": tilelang.__version__,
        **described,
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_DEADLINE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return done.stdout.splitlines()[0].strip()


def run_case(case: Case, workspace: Workspace, copies: Copies, seconds: float) -> dict[str, Any]:
    """The row of a case; its error, if it fails, which costs the others nothing."""
    try:
        return measure(case, workspace, copies, seconds)
    except Exception as error:
        traceback.print_exc()
        return {"operation": case.operation, **case.sizes, "error": repr(error)}


def print_row(row: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": "gpu_kernels", **row}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--gib", type=float, default=4.0, help="memory to rotate over, twice")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_kernels: given no CUDA device, expected one (or --device cpu)")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")

    print_row(describe_card(device))
    workspace = Workspace(device, int(options.gib * 2**30))
    copies = Copies(workspace, options.seconds)
    for kind in ("device", "to_device", "to_host"):
        print_row(
            {"operation": "copy", "beside": kind, "gb_per_s": round(copies.rate(kind) / 1e9, 1)}
        )
    is_good = True
    for case in cases(device):
        if options.only not in case.operation:
            continue
        row = run_case(case, workspace, copies, options.seconds)
        is_good &= row.get("is_right", False)
        print_row(row)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
