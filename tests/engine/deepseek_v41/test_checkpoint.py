"""Folders of a model: written, opened and loaded with equal values; the golden one too."""

import json
import os
import resource
import stat
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ModelFileError
from engine.models.deepseek_v41.build_weights import build_weights, dequantise
from engine.models.deepseek_v41.checkpoint.files import INDEX_NAME
from engine.models.deepseek_v41.checkpoint.folder import (
    contents_sha256,
    load_weights,
    open_folder,
    require_numbers,
)
from engine.models.deepseek_v41.checkpoint.tensor_schema import Storage, scale_name, tensor_schema
from engine.models.deepseek_v41.checkpoint.writer import plan_shards, write_folder
from engine.models.deepseek_v41.random_weights import random_tensors, random_weights, stream_base
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.vision.weights import build_vision_weights
from tests.engine.deepseek_v41.model_bench import ModelBench
from tests.engine.deepseek_v41.tiny_checkpoint import (
    RawFile,
    tiny_config,
    tiny_tensors,
    write_tiny,
)
from tests.golden_folder import golden_folder

SCHEMA = tensor_schema(tiny_config())


def tensors_of(weights: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside nested dataclasses and tuples, with its path."""
    if isinstance(weights, torch.Tensor):
        yield path, weights
    elif isinstance(weights, tuple):
        for index, item in enumerate(weights):
            yield from tensors_of(item, f"{path}[{index}]")
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from tensors_of(getattr(weights, field.name), f"{path}.{field.name}")


def assert_equal_weights(one: object, other: object) -> None:
    ones, others = dict(tensors_of(one)), dict(tensors_of(other))
    assert ones.keys() == others.keys()
    for path, tensor in ones.items():
        assert tensor.dtype == others[path].dtype, path
        as_bytes = tensor.contiguous().view(torch.uint8)
        assert torch.equal(as_bytes, others[path].contiguous().view(torch.uint8)), path


@pytest.mark.parametrize("is_sharded", [False, True])
def test_plain_folder_comes_back_bit_for_bit(tmp_path: Path, is_sharded: bool) -> None:
    folder = write_tiny(tmp_path / "model", is_sharded=is_sharded)
    config, weights = load_weights(folder)
    assert config == tiny_config()
    assert_equal_weights(weights, build_weights(config, tiny_tensors()))
    assert (folder / INDEX_NAME).exists() == is_sharded
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("is_sharded", [False, True])
def test_quantised_folder_holds_the_released_types(tmp_path: Path, is_sharded: bool) -> None:
    folder = write_tiny(tmp_path / "model", quantised=True, is_sharded=is_sharded)
    checkpoint = open_folder(folder)
    dtypes = {
        Storage.FLOAT32: torch.float32,
        Storage.PLAIN: torch.bfloat16,
        Storage.FP8_BLOCKS: torch.float8_e4m3fn,
        Storage.FP4_ROWS: torch.int8,
        Storage.FP8_ROWS: torch.float8_e4m3fn,
    }
    for name, spec in SCHEMA.items():
        assert checkpoint.tensors[name].dtype == dtypes[spec.storage], name
        assert (scale_name(name) in checkpoint.tensors) == spec.may_be_quantised, name
    assert "quantization_config" in json.loads((folder / "config.json").read_text())


def dequantise_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    values = {name: tensors[name] for name in SCHEMA}
    for name, spec in SCHEMA.items():
        if scale_name(name) in tensors:
            values[name] = dequantise(spec, tensors[name], tensors[scale_name(name)])
    return values


def test_quantised_values_are_close(tmp_path: Path) -> None:
    originals = tiny_tensors()
    values = dequantise_all(open_folder(write_tiny(tmp_path, quantised=True)).tensors)
    for name, spec in SCHEMA.items():
        # Half the widest step, 1 of 6 and 16 of 448, with a scale at most twice the least one.
        bounds = {Storage.FP4_ROWS: 2 / 6, Storage.FP8_ROWS: 1 / 14, Storage.FP8_BLOCKS: 1 / 14}
        original = originals[name].float()
        bound = bounds.get(spec.storage, 0.0) * original.abs().amax()
        assert (values[name].float() - original).abs().amax() <= bound, name


def test_quantised_folder_keeps_its_values_when_written_again(tmp_path: Path) -> None:
    first = open_folder(write_tiny(tmp_path / "a", quantised=True))
    values = dequantise_all(first.tensors)
    write_folder(tmp_path / "same", first.config, first.tensors)
    assert open_folder(tmp_path / "same").sha256 == first.sha256
    write_folder(tmp_path / "again", first.config, values, quantised=True)
    # Codes may differ: where the largest was rounded down, half the scale may do.
    again = dequantise_all(open_folder(tmp_path / "again").tensors)
    write_folder(tmp_path / "plain", first.config, values)
    plain = open_folder(tmp_path / "plain").tensors
    for name, value in values.items():
        assert torch.equal(again[name], value), name
        assert torch.equal(plain[name], value), name


def test_table_stays_as_stored_and_other_matrices_do_not(tmp_path: Path) -> None:
    _, weights = load_weights(write_tiny(tmp_path / "model", quantised=True))
    engram = weights.layers[1].engram
    assert engram is not None
    assert engram.table.scales is not None
    assert engram.table.rows.dtype == torch.float8_e4m3fn
    assert engram.kv.dtype == weights.layers[0].experts.gate.dtype == torch.float32


def test_tables_are_mapped_and_other_tensors_copied(tmp_path: Path) -> None:
    tensors = open_folder(write_tiny(tmp_path / "model", quantised=True)).tensors
    prefix = "layers.1.engram.embed"
    mapped = {f"{prefix}.weight", f"{prefix}.scale"}
    for name in [*mapped, "norm.weight", "layers.1.engram.wkv.weight"]:
        one, other = tensors[name], tensors[name]
        assert (one.data_ptr() == other.data_ptr()) == (name in mapped), name


def test_asking_for_a_name_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = open_folder(write_tiny(tmp_path / "model")).tensors

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(torch.Tensor, "clone", refuse)
    assert "norm.weight" in tensors
    assert "norm.scale" not in tensors
    with pytest.raises(AssertionError, match="read"):
        tensors["norm.weight"]


def test_asked_type_spares_what_is_always_float32(tmp_path: Path) -> None:
    _, weights = load_weights(write_tiny(tmp_path / "model"), torch.bfloat16)
    assert weights.layers[0].attention.q_a.dtype == torch.bfloat16
    assert weights.layers[0].attention.sink.dtype == torch.float32
    assert weights.layers[0].attention_mix.projection.dtype == torch.float32


def test_vision_encoder_is_built_from_the_same_folder(tmp_path: Path) -> None:
    checkpoint = open_folder(write_tiny(tmp_path / "model", quantised=True))
    vision = build_vision_weights(checkpoint.config, checkpoint.tensors, torch.float32)
    assert torch.equal(vision.image_start, tiny_tensors()["image_start"].float())


def test_experts_are_stacked_in_their_order() -> None:
    tensors = tiny_tensors()
    experts = build_weights(tiny_config(), tensors).layers[0].experts
    for index in range(tiny_config().experts):
        prefix = f"layers.0.ffn.experts.{index}"
        assert torch.equal(experts.gate[index], tensors[f"{prefix}.w1.weight"].float())
        assert torch.equal(experts.up[index], tensors[f"{prefix}.w3.weight"].float())
        assert torch.equal(experts.down[index], tensors[f"{prefix}.w2.weight"].float())


def test_order_of_tensors_and_shards_does_not_matter(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", is_sharded=True)
    expected = open_folder(folder)
    paths = sorted(folder.glob("*.safetensors"))
    files = [RawFile(path) for path in paths]
    # All tensors from last to first, over the files from last to first.
    entries = [
        (name, *file.take(name)) for file in reversed(files) for name in reversed(file.names)
    ]
    per_file = -(-len(entries) // len(files))
    places = {}
    for number, (name, entry, data) in enumerate(entries):
        file = files[number // per_file]
        file.put(name, entry, data)
        places[name] = file.path.name
    for file in files:
        file.write()
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    shuffled = open_folder(folder)
    assert shuffled.sha256 == expected.sha256
    assert_equal_weights(load_weights(folder)[1], build_weights(tiny_config(), tiny_tensors()))
    (folder / INDEX_NAME).unlink()
    assert open_folder(folder).sha256 == expected.sha256


def test_sha256_tells_weights_and_sizes_apart(tmp_path: Path) -> None:
    plain = open_folder(write_tiny(tmp_path / "a"))
    sharded = open_folder(write_tiny(tmp_path / "b", is_sharded=True))
    assert plain.sha256 == sharded.sha256 == contents_sha256(tiny_config(), tiny_tensors())
    assert plain.sha256 != open_folder(write_tiny(tmp_path / "c", quantised=True)).sha256
    changed = dict(tiny_tensors())
    changed["norm.weight"] = changed["norm.weight"].clone()
    changed["norm.weight"][7] += 0.25
    assert contents_sha256(tiny_config(), changed) != plain.sha256
    other = replace(tiny_config(), swiglu_limit=9.0)
    assert contents_sha256(other, tiny_tensors()) != plain.sha256


def test_another_reader_reads_the_same(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", is_sharded=True)
    index = json.loads((folder / INDEX_NAME).read_text())
    read: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        assert {index["weight_map"][name] for name in tensors} == {path.name}
        read |= tensors
    assert contents_sha256(tiny_config(), read) == open_folder(folder).sha256
    size = sum(tensor.numel() * tensor.element_size() for tensor in read.values())
    assert index["metadata"]["total_size"] == size


def test_new_checkpoint_replaces_the_old_one(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", is_sharded=True)
    old = open_folder(folder)
    other = random_tensors(tiny_config(), torch.Generator().manual_seed(6))
    (folder / "tokenizer.json").write_text("{}")
    (folder / ".partial-model-00001-of-00099.safetensors").write_bytes(b"killed")
    write_folder(folder, tiny_config(), other)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert open_folder(folder).sha256 == contents_sha256(tiny_config(), other)
    # Who had the old one open still has it.
    assert old.sha256 == contents_sha256(tiny_config(), tiny_tensors())


@pytest.mark.parametrize("failing", ["config.json", "model.safetensors"])
def test_no_half_written_folder_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    folder = write_tiny(tmp_path / "model", is_sharded=True)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target.name == failing:
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        write_tiny(folder)
    with pytest.raises(ModelFileError, match=r"config\.json: there is no such file"):
        open_folder(folder)
    assert not list(folder.glob(".partial-*"))


def test_config_is_gone_from_the_disk_before_other_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not bring the old config.json back to shards of two checkpoints."""
    folder = write_tiny(tmp_path / "model", is_sharded=True)
    steps: list[str] = []
    unlink, rename, sync = Path.unlink, Path.rename, os.fsync

    def watch_unlink(path: Path, missing_ok: bool = False) -> None:
        if not path.name.startswith(".partial-"):
            steps.append(f"remove {path.name}")
        unlink(path, missing_ok=missing_ok)

    def watch_rename(path: Path, target: Path) -> Path:
        steps.append(f"place {target.name}")
        return rename(path, target)

    def watch_sync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            steps.append("sync folder")
        sync(handle)

    monkeypatch.setattr(Path, "unlink", watch_unlink)
    monkeypatch.setattr(Path, "rename", watch_rename)
    monkeypatch.setattr(os, "fsync", watch_sync)
    write_tiny(folder)
    shards = [step for step in steps if step.startswith("remove model")]
    assert len(shards) > 2
    assert [step for step in steps if step not in shards] == [
        *("remove config.json", "sync folder", "place model.safetensors", "sync folder"),
        *("place config.json", "sync folder"),
    ]
    assert steps[:2] == ["remove config.json", "sync folder"]


def test_tensors_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    tensors = dict(tiny_tensors())
    del tensors["norm.weight"]
    tensors["head.weight"] = tensors["head.weight"].double()
    tensors["extra"] = torch.zeros(1)
    with pytest.raises(ModelFileError) as caught:
        write_folder(tmp_path / "model", tiny_config(), tensors)
    assert len(caught.value.problems) == 3
    tensors = {**tiny_tensors(), "norm.weight": torch.full((32,), torch.nan)}
    with pytest.raises(ModelFileError, match=r"norm\.weight: 32 of 32 values"):
        write_folder(tmp_path / "model", tiny_config(), tensors)
    with pytest.raises(ModelFileError, match="window"):
        write_folder(tmp_path / "model", replace(tiny_config(), window=200), tiny_tensors())
    assert not (tmp_path / "model").exists()


def test_full_disk_is_told_as_the_systems_error_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    before, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors cannot be written"):
            write_tiny(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, limit))
    assert list(folder.iterdir()) == []


def test_channels_that_cannot_be_cut_are_not_quantised(tmp_path: Path) -> None:
    config = replace(tiny_config(), expert_intermediate=24)
    tensors = random_tensors(config, torch.Generator().manual_seed(1))
    write_folder(tmp_path / "plain", config, tensors)
    with pytest.raises(ModelFileError, match=r"w2\.weight: 24 channels"):
        write_folder(tmp_path / "packed", config, tensors, quantised=True)


def test_tensors_that_share_memory_are_written(tmp_path: Path) -> None:
    tensors = dict(tiny_tensors())
    names = [f"layers.0.ffn.experts.{index}.w1.weight" for index in range(2)]
    stacked = torch.stack([tensors[name] for name in names]).requires_grad_()
    tensors |= {name: stacked[index] for index, name in enumerate(names)}
    write_folder(tmp_path / "model", tiny_config(), tensors)
    assert open_folder(tmp_path / "model").sha256 == contents_sha256(tiny_config(), tiny_tensors())


def test_shards_keep_the_order_and_the_limit() -> None:
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1, "e": 7, "f": 1}
    assert plan_shards(sizes, 8) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert plan_shards(sizes, 100) == [list(sizes)]


def test_schema_of_flash_counts_its_parameters() -> None:
    schema = tensor_schema(shipped_config("v41-flash"))
    sizes = {name: torch.Size(spec.shape).numel() for name, spec in schema.items()}
    tables = sum(size for name, size in sizes.items() if name.endswith("engram.embed.weight"))
    drafts = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    vision = sum(size for name, size in sizes.items() if name.startswith(("vision", "aligner")))
    assert round(tables / 1e9) == 197
    assert round((sum(sizes.values()) - tables - drafts - vision) / 1e9) == 552
    assert schema["layers.20.attn.wo_a.weight"].shape == (8192, 4096)
    assert schema["layers.14.engram.wkv.weight"].scale_shape == (800, 192)
    assert schema["layers.0.ffn.experts.383.w2.weight"].packed_shape == (5120, 1152)
    assert "layers.20.attn.compressor.wgate.weight" not in schema
    assert "layers.24.attn.indexer.wk.weight" not in schema


def test_random_weights_depend_on_the_seed_alone() -> None:
    config = tiny_config()
    same = random_tensors(config, torch.Generator().manual_seed(5))
    assert contents_sha256(config, same) == contents_sha256(config, tiny_tensors())
    other = random_tensors(config, torch.Generator().manual_seed(6))
    assert contents_sha256(config, other) != contents_sha256(config, same)
    weights = random_weights(config, torch.Generator().manual_seed(5))
    assert_equal_weights(weights, build_weights(config, same))
    for layer, role in enumerate(weights.layers):
        assert torch.equal(role.attention_mix.base, stream_base(config.streams, layer))


def test_stream_base_is_the_released_start() -> None:
    base = stream_base(4, 6)
    assert base[:4].tolist() == [-3, -3, 3, -3]
    assert base[4:8].tolist() == [0] * 4
    assert torch.equal(base[8:].view(4, 4), 6 * torch.eye(4) - 3)


def test_golden_folder_loads_by_its_names() -> None:
    folder = golden_folder() / "v41"
    checkpoint = open_folder(folder)
    assert set(checkpoint.tensors) == set(tensor_schema(checkpoint.config))
    raw = load_file(folder / "model.safetensors")
    weights = load_weights(folder)[1]
    assert torch.equal(weights.layers[4].attention.q_a, raw["layers.4.attn.wq_a.weight"].float())
    assert weights.draft is not None
    head = raw["mtp.2.markov_head.head.weight"].float()
    assert torch.equal(weights.draft.markov_head, head)


def test_golden_quantised_tensors_replace_the_plain_ones() -> None:
    folder = golden_folder() / "v41"
    overriding = ["model_quant.safetensors"]
    checkpoint = open_folder(folder, overriding=overriding)
    require_numbers(checkpoint)
    schema = tensor_schema(checkpoint.config)
    packed = {name for name, spec in schema.items() if spec.may_be_quantised}
    assert set(checkpoint.tensors) == set(schema) | {scale_name(name) for name in packed}
    plain = load_file(folder / "model.safetensors")
    _, weights = load_weights(folder, overriding=overriding)
    engram = weights.layers[1].engram
    assert engram is not None
    assert engram.table.scales is not None
    spec = schema["layers.1.engram.embed.weight"]
    table = dequantise(spec, engram.table.rows, engram.table.scales)
    # The plain file has the exact dequantised values of the tables.
    assert torch.equal(table, plain["layers.1.engram.embed.weight"].float())
    q_a = plain["layers.0.attn.wq_a.weight"].float()
    error = (weights.layers[0].attention.q_a - q_a).abs().amax()
    assert 0 < error <= q_a.abs().amax() / 14


def test_golden_logits_of_quantised_weights_survive_being_written(tmp_path: Path) -> None:
    folder = golden_folder() / "v41"
    extra, sequences = np.load(folder / "extra.npz"), np.load(folder / "sequences.npz")
    checkpoint = open_folder(folder, overriding=["model_quant.safetensors"])
    write_folder(tmp_path, checkpoint.config, checkpoint.tensors, shard_bytes_max=300_000)
    compressed_ids_V = torch.from_numpy(sequences["engram_token_map"])
    bench = ModelBench.build(*load_weights(tmp_path), compressed_ids_V)
    token_ids = sequences["ids_n33"].tolist()
    logits_TV = bench.run(bench.begin(len(token_ids)), token_ids).numpy()
    error_T = np.abs(logits_TV - extra["quant_logits_f32_n33"]).max(-1)
    assert (error_T <= 3 * extra["quant_noise_n33"] + 1e-4).all()
