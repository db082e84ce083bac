"""Models that the engine's tests share."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.block_store import BlockStore
from engine.errors import MissingModel
from engine.llm import LLM, LLMConfig, load_llm
from engine.load import ComputeType, find_default_model
from tests.engine.tiny_model import TinyModel
from tests.kvstore.agent.agent_process import short_folder
from tests.patience import OPERATION_S

OpenTiny = Callable[..., LLM]


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """Path of the real model's file; tests that need it are skipped where it is not installed."""
    try:
        return find_default_model()
    except MissingModel as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel().write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def open_tiny(tiny_path: Path) -> Iterator[OpenTiny]:
    """Open engines with the tiny model; each ends with the test, if the test has not ended it."""
    engines: list[LLM] = []

    def open_engine(
        store: BlockStore | None = None,
        *,
        compute: ComputeType = "float32",
        tenant: str = "default",
        path: Path = tiny_path,
        config: LLMConfig | None = None,
    ) -> LLM:
        config = config or LLMConfig(pool_blocks=16, fetch_deadline_s=OPERATION_S)
        llm = load_llm(
            path, store=store, clock=time.monotonic, compute=compute, tenant=tenant, config=config
        )
        engines.append(llm)
        return llm

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session", autouse=True)
def threads() -> None:
    """One thread, so that tests and other work on the machine do not slow each other down."""
    torch.set_num_threads(1)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets."""
    path = short_folder()
    yield path
    shutil.rmtree(path)
