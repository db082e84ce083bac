"""What every test run has: seeds that are printed, hypothesis profiles, and skips that say why."""

import gc
import hashlib
import importlib.util
import os
import random
import secrets
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from engine.threads import prepare_environment
from kvstore.client import (
    AgentClient,
    BlockingAgentClient,
    BlockingStoreClient,
    StoreClient,
    channel,
)
from tests.patience import PATIENCE_S, make_patient

# Where an environment forbids to keep what was compiled, each of the hundreds of processes that
# tests start would compile all of its modules again, which takes it longer than the rest of its
# start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Read when torch is loaded: with it, bits do not depend on the number of threads or on alignment.
prepare_environment()

# A wall-clock limit for one example, or for making some, would fail on a busy machine, not on a
# slow program: each test has its time-out instead.
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# The same examples on every run, so that a failure belongs to the change that is being checked.
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.register_profile(
    "torture",
    parent=settings.get_profile("default"),
    max_examples=5_000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default")
settings.load_profile(PROFILE)

# Mixed into every seed of the `rng` fixture: another value gives other random inputs.
SEED = int(os.environ.get("CACHALOT_TEST_SEED", "0"))


SLOW_TESTS_WEIGH = 100
"""As much as so many quick tests, roughly."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give hypothesis a seed that the header can name, unless the command line gave one."""
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(secrets.randbits(32))
    # xdist would begin with the files of the most tests, and end with long ones of a few.
    config.option.loadscopereorder = False
    # Run in the background of a script, this process ignores Ctrl-C, and so would all that tests
    # start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the seeds and how to have them again."""
    seed = config.getoption("hypothesis_seed")
    drawn = "from each test's name" if PROFILE == "ci" else f"{seed} (--hypothesis-seed={seed})"
    return [
        f"hypothesis profile: {PROFILE} (HYPOTHESIS_PROFILE), seed: {drawn}",
        f"random seed: {SEED} (CACHALOT_TEST_SEED)",
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that no process is left alone with one at the end. Skip what this
    machine cannot run, and say what is missing."""
    weights: Counter[Path] = Counter()
    for item in items:
        weights[item.path] += SLOW_TESTS_WEIGH if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: -weights[item.path])
    for marker, find_lack in (("gpu", _find_gpu_lack), ("threefs", _find_threefs_lack)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        lack = find_lack() if marked else None
        if lack is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=lack))


def pytest_collection_finish() -> None:
    """Thousands of tests and all modules stay to the end: searches for garbage leave them out, each
    of which takes 0.4 s otherwise."""
    gc.collect()
    gc.freeze()


def _find_gpu_lack() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    # It takes a second to import, so only where a test asks for a device.
    has_device = importlib.import_module("torch").cuda.is_available()
    return None if has_device else "no CUDA device"


def _find_threefs_lack() -> str | None:
    folder = os.environ.get("CACHALOT_THREEFS_DIR")
    if folder is not None and Path(folder).is_dir():
        return None
    return f"CACHALOT_THREEFS_DIR names no 3FS mount: {folder}"


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> None:
    """No operation of a healthy cluster ends at its deadline, and no connection: a second or two
    otherwise."""
    make_patient(StoreClient, AgentClient, BlockingStoreClient, BlockingAgentClient)
    channel.CONNECT_DEADLINE_S = PATIENCE_S


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Return a random source that is the same in every run of this test; printed if it fails."""
    identity = f"{SEED}:{request.node.nodeid}"
    seed = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "little")
    request.node.add_report_section("setup", "seed", f"rng: random.Random({seed}) of {identity}")
    return random.Random(seed)
