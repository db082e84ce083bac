"""What compiles TileLang programs: source without a device, a kernel only with one."""

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import pytest
import tilelang
import tilelang.language as T
import torch

from kernels.gpu import compiler
from kernels.gpu.compiler import NoCudaDevice, Program, launcher, lower_to_cuda
from kernels.gpu.mapped_memory import device_view
from tests.kernels.gpu.cuda_on_cpu import ARCHITECTURES, run_on_cpu


def add_program(addend: int) -> Program:
    """to[n] = given[n] + addend, a block of 64 threads for every 64 numbers."""
    count = T.dynamic("count")

    @T.prim_func
    def add(given: T.Tensor((count,), "int32"), to: T.Tensor((count,), "int32")) -> None:
        with T.Kernel(T.ceildiv(count, 64), threads=64) as block:
            at = block * 64 + T.get_thread_binding()
            if at < count:
                to[at] = given[at] + addend

    return add


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_program_is_lowered_without_a_device(architecture: str) -> None:
    source = lower_to_cuda(add_program(7), architecture)
    assert "__global__ void __launch_bounds__(64" in source
    assert "+ 7" in source


def test_lowered_source_runs_on_the_cpu() -> None:
    given, to = torch.arange(100, dtype=torch.int32), torch.zeros(100, dtype=torch.int32)
    run_on_cpu(add_program(7), (2,), given=given, to=to, count=100)
    assert torch.equal(to, given + 7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_launcher_says_what_to_do_when_there_is_no_device() -> None:
    with pytest.raises(NoCudaDevice, match="add_program: given no CUDA device, expected one"):
        launcher(add_program, 7)


class SlowCompiler:
    """TileLang where there is a device, as far as a launcher is concerned. Its first call ends when
    it is let; calls in all are counted."""

    def __init__(self) -> None:
        self.calls = 0
        self.has_begun, self.may_end = Event(), Event()
        self.fails = False

    def compile(self, program: Program, **_: object) -> SimpleNamespace:
        self.calls += 1
        self.has_begun.set()
        assert self.may_end.wait(60)
        if self.fails:
            raise RuntimeError("nvcc has failed")
        executable = {"main": object()}
        return SimpleNamespace(
            adapter=SimpleNamespace(get_exportable_executable=lambda: executable)
        )


@pytest.fixture
def slow_compiler(monkeypatch: pytest.MonkeyPatch) -> SlowCompiler:
    slow = SlowCompiler()
    monkeypatch.setattr(tilelang, "compile", slow.compile)
    monkeypatch.setattr(compiler, "get_target_arch", lambda capability: "90a")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    return slow


def test_kernel_is_compiled_once_however_many_threads_ask_for_it(
    slow_compiler: SlowCompiler,
) -> None:
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(launcher, add_program, 1001) for _ in range(4)]
        assert slow_compiler.has_begun.wait(60)
        slow_compiler.may_end.set()
        first = asked[0].result()
        assert all(one.result() is first for one in asked)
    assert launcher(add_program, 1001) is first
    assert slow_compiler.calls == 1


def test_kernel_that_could_not_be_compiled_is_tried_again(slow_compiler: SlowCompiler) -> None:
    slow_compiler.may_end.set()
    slow_compiler.fails = True
    with pytest.raises(RuntimeError, match="nvcc has failed"):
        launcher(add_program, 1002)
    slow_compiler.fails = False
    assert launcher(add_program, 1002) is launcher(add_program, 1002)
    assert slow_compiler.calls == 2


@pytest.mark.gpu
def test_launcher_is_compiled_once_for_each_set_of_sizes() -> None:
    given = torch.arange(100, dtype=torch.int32, device="cuda")
    to = torch.zeros_like(given)
    for addend in (1, 2):
        add = launcher(add_program, addend)
        add(given, to)
        assert torch.equal(to, given + addend)
        assert launcher(add_program, addend) is add


def test_package_names_the_extra_when_tilelang_is_not_there() -> None:
    program = "import sys; sys.modules['tilelang'] = None\nimport kernels.gpu.compiler"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert "install this project with its extra gpu" in done.stderr


@pytest.mark.parametrize(
    ("host", "error", "message"),
    [
        (torch.zeros(4), TypeError, "given torch.float32"),
        (torch.zeros(0, dtype=torch.uint8), ValueError, "expected some contiguous bytes"),
        (torch.zeros(8, dtype=torch.uint8)[::2], ValueError, "expected some contiguous bytes"),
        (torch.zeros(8, dtype=torch.uint8), ValueError, "given pageable memory"),
    ],
)
def test_view_of_host_memory_is_refused_when_a_device_cannot_see_it(
    host: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        device_view(host, torch.device("cuda", 0))


@pytest.mark.gpu
def test_view_of_host_memory_shows_and_takes_its_bytes() -> None:
    host = torch.arange(200, dtype=torch.uint8).view(10, 20).pin_memory()
    view = device_view(host, torch.device("cuda", 0))
    assert view.device.type == "cuda"
    assert torch.equal(view.cpu(), host)
    view[3:5] = 7
    torch.cuda.synchronize()
    assert host[3:5].eq(7).all()
    part = view[5]
    del host, view
    assert part.sum().item() == sum(range(100, 120))


def test_what_tilelang_logs_is_logged_as_all_else_and_not_printed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It prints to stdout by itself, before the JSON of a command."""
    with caplog.at_level(logging.INFO, "tilelang"):
        logging.getLogger("tilelang.jit.kernel").info("compiled")
    assert capsys.readouterr().out == ""
    assert "compiled" in caplog.messages
