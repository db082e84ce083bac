"""The frame of the kernels' benchmark, on a CPU: right results, wrong ones and faults."""

from collections.abc import Callable

import pytest
import torch

from benchmarks import gpu_kernels_copies
from benchmarks.gpu_kernels import run_case
from benchmarks.gpu_kernels_copies import copy_cases
from benchmarks.gpu_kernels_erasure import BLOCK_BYTES, erasure_cases
from benchmarks.gpu_roofline import Case, Copies, Prepared, Workspace

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace(CPU, 4 * 2**20)


@pytest.fixture(scope="module")
def copies(workspace: Workspace) -> Copies:
    return Copies(workspace, seconds=0)


def test_every_copy_is_measured_and_right(workspace: Workspace, copies: Copies) -> None:
    rows = [run_case(case, workspace, copies, seconds=0) for case in copy_cases(CPU)]
    assert {row["operation"] for row in rows} == {
        "scatter_block_sections",
        "gather_block_sections",
        "snapshot_windows",
        "restore_windows",
    }
    assert all(row["is_right"] and row["gb_per_s"] > 0 and row["of_copy"] > 0 for row in rows)


def test_erasure_and_checksums_are_measured_and_right() -> None:
    """Of two blocks: on a CPU the references take their time."""
    workspace = Workspace(CPU, 2 * BLOCK_BYTES)
    copies = Copies(workspace, seconds=0)
    by_name = {case.operation: case for case in erasure_cases()}
    rows = {name: run_case(case, workspace, copies, seconds=0) for name, case in by_name.items()}
    combined = {"gf256_encode", "gf256_decode_one", "gf256_decode_two"}
    assert set(rows) == combined | {"xxh3_of_shards"}
    assert all(row["is_right"] for row in rows.values())
    assert all("block_gb_per_s" in rows[name] for name in combined)
    assert [rows[name]["goal_block_gb_per_s"] for name in combined] == [1000.0] * 3


def do_nothing(*_: object) -> None:
    """A kernel that never ran."""


def write_too_much(*tensors: object) -> None:
    """As it should, and one byte more, in the last of what it was given."""
    pool_or_slots = [one for one in tensors if isinstance(one, torch.Tensor) and one.dim() == 2]
    for one in pool_or_slots:
        one[-1, -1] ^= 1


@pytest.mark.parametrize("also", [do_nothing, write_too_much])
@pytest.mark.parametrize(
    "operation",
    ["scatter_block_sections", "gather_block_sections", "snapshot_windows", "restore_windows"],
)
def test_copy_that_leaves_out_a_byte_or_writes_another_is_told(
    workspace: Workspace,
    copies: Copies,
    operation: str,
    also: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = gpu_kernels_copies._function(operation, CPU)

    def wrong(*arguments: object) -> None:
        if also is write_too_much:
            right(*arguments)
        also(*arguments)

    monkeypatch.setattr(gpu_kernels_copies, "_function", lambda name, device: wrong)
    case = next(one for one in copy_cases(CPU) if one.operation == operation)
    row = run_case(case, workspace, copies, seconds=0)
    assert row["is_right"] is False, row


def test_wrong_result_is_told(workspace: Workspace, copies: Copies) -> None:
    prepared = Prepared(calls=[lambda: None], moved_bytes=2**20, is_right=lambda: False)
    case = Case(operation="nothing", sizes={"bytes": 7}, prepare=lambda _: prepared)
    row = run_case(case, workspace, copies, seconds=0)
    assert row["is_right"] is False
    assert row["bytes"] == 7


def test_fault_of_a_case_becomes_its_row(workspace: Workspace, copies: Copies) -> None:
    def fail(_: Workspace) -> Prepared:
        raise ValueError("no room")

    case = Case(operation="nothing", sizes={"bytes": 7}, prepare=fail)
    row = run_case(case, workspace, copies, seconds=0)
    assert row == {"operation": "nothing", "bytes": 7, "error": "ValueError('no room')"}
