"""Folders that are not whole or not right: one report of everything, and never half a model."""

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import MissingModel, ModelFileError
from engine.models.deepseek_v41 import load
from engine.models.deepseek_v41.checkpoint import files
from engine.models.deepseek_v41.checkpoint.files import INDEX_NAME
from engine.models.deepseek_v41.checkpoint.folder import load_weights, open_folder
from engine.models.deepseek_v41.checkpoint.tensor_file import TensorFile, read_tensor_file
from engine.models.deepseek_v41.json_file import parse_json
from tests.engine.deepseek_v41.tiny_checkpoint import RawFile, write_tiny


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), quantised=True)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("shards"), quantised=True, is_sharded=True)


def copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def raw(folder: Path) -> RawFile:
    return RawFile(folder / "model.safetensors")


def problems_of(folder: Path) -> list[str]:
    """What `open_folder` tells, having opened no file for reading tensors."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("tensors were read from a checkpoint with problems")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors, "safe_open", refuse)
        with pytest.raises(ModelFileError) as caught:
            open_folder(folder)
    return caught.value.problems


def test_missing_folder_and_folder_that_is_a_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(MissingModel):
        open_folder(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingModel):
        open_folder(tmp_path / "file")


def test_empty_folder_lacks_config_and_tensors(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == [
        "config.json: there is no such file",
        "there is no .safetensors file",
    ]


def test_every_kind_of_fault_is_told_at_once(quantised: Path, tmp_path: Path) -> None:
    folder = copy(quantised, tmp_path)
    file = raw(folder)
    file.rename("layers.0.attn.q_norm.weight", "layers.0.attn.query_norm.weight")
    entry, data = file.take("norm.weight")
    file.put("norm.weight", {**entry, "shape": [4, 8]}, data)
    entry, data = file.take("layers.0.attn.attn_sink")
    file.put("layers.0.attn.attn_sink", {**entry, "dtype": "I32"}, data)
    file.take("layers.0.attn.wkv.scale")
    file.take("layers.1.attn.wkv.weight")
    entry, data = file.take("layers.0.attn.wo_a.scale")
    file.put("layers.0.attn.wo_a.scale", {"dtype": "BF16", "shape": [0, 4]}, b"")
    entry, data = file.take("layers.0.ffn.experts.0.w1.scale")
    file.put("layers.0.ffn.experts.0.w1.scale", {**entry, "shape": [1, 32]}, data)
    entry, data = file.take("layers.0.ffn.experts.1.w1.weight")
    plain = {"dtype": "BF16", "shape": [32, 32]}
    file.put("layers.0.ffn.experts.1.w1.weight", plain, data * 4)
    file.write()
    told = problems_of(folder)
    assert set(told) == {
        "unknown tensor 'layers.0.attn.query_norm.weight'",
        "missing tensor layers.0.attn.q_norm.weight",
        "norm.weight: shape [4, 8], expected [32]",
        "layers.0.attn.attn_sink: dtype I32, expected F32",
        "missing tensor layers.0.attn.wkv.scale, the scale of layers.0.attn.wkv.weight",
        "layers.1.attn.wkv.scale: a scale without its tensor",
        "missing tensor layers.1.attn.wkv.weight",
        "layers.0.attn.wo_a.scale: dtype BF16, expected F8_E8M0",
        "layers.0.ffn.experts.0.w1.scale: shape [1, 32], expected [32, 1]",
        "layers.0.ffn.experts.1.w1.scale: a scale beside a tensor that is not quantised",
    }
    assert len(told) == len(set(told))


def test_faults_of_config_and_of_files_are_told_together(quantised: Path, tmp_path: Path) -> None:
    folder = copy(quantised, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["head_dim"] = "32"
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"more")
    assert problems_of(folder) == [
        "config.json: text_config.head_dim: given '32', expected an integer",
        "model.safetensors: 4 bytes after the last tensor",
    ]


def test_config_of_another_size_is_told_by_the_tensors(quantised: Path, tmp_path: Path) -> None:
    folder = copy(quantised, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"vocab_size": 66, "moe_intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    told = problems_of(folder)
    assert "embed.weight: shape [64, 32], expected [66, 32]" in told
    assert "mtp.1.markov_head.head.weight: shape [64, 32], expected [66, 32]" in told
    assert "layers.3.ffn.experts.1.w2.weight: shape [32, 16], expected [32, 32]" in told


@pytest.mark.parametrize("share", [0.0, 0.000_05, 0.01, 0.2, 0.5, 0.9999])
def test_file_that_is_cut_off_is_told(quantised: Path, tmp_path: Path, share: float) -> None:
    folder = copy(quantised, tmp_path)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    (problem,) = problems_of(folder)
    assert problem.startswith("model.safetensors: ")
    assert "cut off" in problem or "too short" in problem


def framed(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


ENTRY = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (framed(b""), "header of 0 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "header of 9223372036854775808 bytes"),
        (framed(b"\xff\xfe\x00"), "not sound JSON"),
        (framed(b"[" * 50_000), "not sound JSON"),
        (framed(b"[1, 2]"), "expected an object"),
        (struct.pack("<Q", 40 << 20) + bytes(9), "no safetensors file: header of 41943040"),
        (framed(b'{"a": 3}'), "expected dtype, shape and data_offsets"),
        (framed(f'{{"a": {ENTRY}, "a": {ENTRY}}}'.encode()) + bytes(4), "keys given twice: 'a'"),
        (framed(f'{{"a": {ENTRY}, "b": {ENTRY}}}'.encode()) + bytes(4), "overlap"),
        (framed(f'{{"a": {ENTRY}}}'.replace("0, 4", "4, 8").encode()) + bytes(8), "holes"),
        (framed(f'{{"a": {ENTRY}}}'.replace("0, 4", "0, 8").encode()) + bytes(8), "expected 4"),
        (framed(f'{{"a": {ENTRY}}}'.replace("F32", "F33").encode()) + bytes(4), "not known"),
        (framed(f'{{"a": {ENTRY}}}'.replace('"F32"', "[]").encode()) + bytes(4), "not known"),
        (framed(f'{{"a": {ENTRY}}}'.replace("[1]", "[-1]").encode()), "list of at most 8 sizes"),
        (framed(f'{{"a": {ENTRY}}}'.replace("[1]", "[1.0]").encode()), "list of at most 8 sizes"),
        (framed(f'{{"a": {ENTRY}}}'.replace("0, 4", "4, 0").encode()), "a begin and an end"),
        (framed(b'{"__metadata__": {"a": 1}}'), "map text to text"),
    ],
)
def test_header_that_makes_no_sense_is_told(
    quantised: Path, tmp_path: Path, content: bytes, told: str
) -> None:
    folder = copy(quantised, tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    problems = problems_of(folder)
    assert any(told in problem for problem in problems), problems[:3]


def test_entry_that_makes_no_sense_is_not_called_missing(quantised: Path, tmp_path: Path) -> None:
    folder = copy(quantised, tmp_path)
    file = raw(folder)
    file.header["norm.weight"]["dtype"] = "F7"
    file.write()
    assert problems_of(folder) == ["model.safetensors: 'norm.weight': dtype 'F7' is not known"]


def test_scale_of_such_an_entry_is_not_said_to_be_alone(quantised: Path, tmp_path: Path) -> None:
    folder = copy(quantised, tmp_path)
    file = raw(folder)
    file.header["layers.0.attn.wkv.weight"]["dtype"] = "F7"
    file.write()
    expected = "model.safetensors: 'layers.0.attn.wkv.weight': dtype 'F7' is not known"
    assert problems_of(folder) == [expected]


def test_names_without_end_are_cut_short(quantised: Path, tmp_path: Path) -> None:
    folder = copy(quantised, tmp_path)
    file = raw(folder)
    file.header |= {"x" * 9999: {}, "y" * 9999: {**file.header["norm.weight"], "shape": [1]}}
    file.write()
    assert all(len(problem) < 300 for problem in problems_of(folder))


def test_file_that_cannot_be_read_is_no_list_of_missing_tensors(
    sharded: Path, tmp_path: Path
) -> None:
    folder = copy(sharded, tmp_path)
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    first.write_bytes(b"")
    second.unlink()
    second.mkdir()
    assert problems_of(folder) == [
        f"{first.name}: 0 bytes, too short for a safetensors file",
        f"{second.name}: there is no such file",
    ]


def test_tensor_in_two_shards_is_told(sharded: Path, tmp_path: Path) -> None:
    folder = copy(sharded, tmp_path)
    first, second, *_ = (RawFile(path) for path in sorted(folder.glob("*.safetensors")))
    name = first.names[0]
    second.put(name, first.header[name], bytes(first.bytes_of(name)))
    second.write()
    told = problems_of(folder)
    assert f"tensor {name!r} is in both {first.path.name} and {second.path.name}" in told


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_index_that_disagrees_with_the_files_is_told(sharded: Path, tmp_path: Path) -> None:
    folder = copy(sharded, tmp_path)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    places = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    held = places["norm.weight"]
    other = next(name for name in names if name != held)

    def change(index: dict[str, str]) -> None:
        index |= {"norm.weight": other, "nothing": other}
        del index["embed.weight"]

    change_index(folder, change)
    assert problems_of(folder) == [
        f"{INDEX_NAME}: 'embed.weight' is said to be in no file, is in {places['embed.weight']}",
        f"{INDEX_NAME}: 'norm.weight' is said to be in {other}, is in {held}",
        f"{INDEX_NAME}: 'nothing' is said to be in {other}, is in no file",
    ]


def test_files_beside_the_index_and_paths_out_of_the_folder_are_told(
    sharded: Path, tmp_path: Path
) -> None:
    folder = copy(sharded, tmp_path)
    shutil.copy(next(folder.glob("*.safetensors")), folder / "old.safetensors")
    change_index(folder, lambda index: index.update({"norm.weight": "../x.safetensors"}))
    assert problems_of(folder)[:2] == [
        f"{INDEX_NAME}: '../x.safetensors' is no safetensors file here",
        f"old.safetensors: not named in {INDEX_NAME}",
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_index_that_makes_no_sense_is_told(sharded: Path, tmp_path: Path, text: str) -> None:
    folder = copy(sharded, tmp_path)
    (folder / INDEX_NAME).write_text(text)
    (problem,) = problems_of(folder)
    assert problem.startswith(INDEX_NAME)


def test_index_that_leads_nowhere_is_told(sharded: Path, tmp_path: Path) -> None:
    """As in a cache of links whose files were not all fetched."""
    folder = copy(sharded, tmp_path)
    (folder / INDEX_NAME).unlink()
    (folder / INDEX_NAME).symlink_to(tmp_path / "none")
    assert problems_of(folder) == [f"{INDEX_NAME}: there is no such file"]


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("has_index", [False, True])
def test_file_of_many_names_is_read_once(
    sharded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    link: Callable[[Path, Path], None],
    has_index: bool,
) -> None:
    folder = copy(sharded, tmp_path)
    first, *_ = names = sorted(path.name for path in folder.glob("*.safetensors"))
    links = [f"z{number}.safetensors" for number in range(20)]
    for name in links:
        link(folder / first, folder / name)
    if has_index:
        change_index(folder, lambda index: index.update({name: name for name in links}))
    else:
        (folder / INDEX_NAME).unlink()
    read: list[str] = []

    def watch(path: Path) -> TensorFile:
        read.append(path.name)
        return read_tensor_file(path)

    monkeypatch.setattr(files, "read_tensor_file", watch)
    assert problems_of(folder) == [f"{name}: the same file as {first}" for name in sorted(links)]
    assert read == names


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.json", INDEX_NAME, "z.safetensors"])
def test_pipe_is_no_file_of_a_model(sharded: Path, tmp_path: Path, name: str) -> None:
    folder = copy(sharded, tmp_path)
    change_index(folder, lambda index: index.update({"nothing": "z.safetensors"}))
    shutil.copy(next(folder.glob("*.safetensors")), folder / "z.safetensors")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    told = f"{name}: it is not a regular file"
    assert told in problems_of(folder)


def test_list_that_never_ends_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match="expected an object"):
        parse_json(b" \n[" + b"[]," * 9)


def replace_before_opening(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """What another does between the check of the headers and the opening of the files."""
    safe_open = safetensors.safe_open

    def change_and_open(path: Path, framework: str) -> object:
        change()
        return safe_open(path, framework)

    monkeypatch.setattr(safetensors, "safe_open", change_and_open)


def test_tensors_that_change_after_their_check_are_told(
    quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(quantised, tmp_path)
    file = raw(folder)
    for name, change in {
        "norm.weight": {"shape": [4, 8]},
        "layers.0.attn.wkv.weight": {"dtype": "I8"},
    }.items():
        file.header[name] |= change
    replace_before_opening(monkeypatch, file.write)
    with pytest.raises(ModelFileError) as caught:
        open_folder(folder)
    assert sorted(problem.split(":")[0] for problem in caught.value.problems) == [
        "layers.0.attn.wkv.weight",
        "norm.weight",
    ]


def test_tensor_that_is_gone_after_its_check_is_told(
    quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(quantised, tmp_path)
    file = raw(folder)
    file.rename("norm.weight", "norm.weights")
    replace_before_opening(monkeypatch, file.write)
    with pytest.raises(ModelFileError, match=r"does not contain tensor norm\.weight"):
        open_folder(folder)


def test_checkpoint_of_the_same_sizes_that_comes_meanwhile_is_told(
    quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(quantised, tmp_path)
    replace_before_opening(monkeypatch, lambda: write_tiny(folder, quantised=True))
    with pytest.raises(ModelFileError, match="replaced by another"):
        open_folder(folder)


def test_tokenizer_is_read_before_the_weights(
    quantised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "build_checked", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(MissingModel, match=r"tokenizer\.json"):
        load.load_model(quantised)


def test_missing_shard_is_told_with_and_without_an_index(sharded: Path, tmp_path: Path) -> None:
    folder = copy(sharded, tmp_path)
    lost = RawFile(sorted(folder.glob("*.safetensors"))[1])
    lost.path.unlink()
    assert problems_of(folder) == [f"{lost.path.name}: there is no such file"]
    (folder / INDEX_NAME).unlink()
    told = " ".join(problems_of(folder))
    assert all(f"missing tensor {name}" in told for name in lost.names if "scale" not in name)


def test_shards_of_another_checkpoint_are_told(
    quantised: Path, sharded: Path, tmp_path: Path
) -> None:
    folder = copy(quantised, tmp_path)
    shard = next(iter(sharded.glob("*.safetensors")))
    shutil.copy(shard, folder)
    assert problems_of(folder) == [f"{shard.name}: a shard beside model.safetensors"]


BAD_VALUES = {
    "norm.weight": struct.pack("<H", 0x7FC0),
    "embed.weight": struct.pack("<H", 0xFF80),
    "layers.1.hc_ffn_fn": struct.pack("<f", float("-inf")),
    "layers.2.attn.wkv.weight": b"\x7f",
    "layers.1.engram.embed.weight": b"\xff",
    "layers.2.attn.wkv.scale": b"\xff",
    "layers.0.ffn.experts.1.w2.scale": b"\xff",
    # 2^120, which 448 times is beyond float32.
    "layers.1.engram.embed.scale": b"\xf7",
    "image_end": struct.pack("<H", 0x7F80),
}


def test_values_that_are_no_numbers_are_told_at_once(quantised: Path, tmp_path: Path) -> None:
    folder = copy(quantised, tmp_path)
    file = raw(folder)
    for name, value in BAD_VALUES.items():
        file.bytes_of(name)[: len(value)] = value
    file.write()
    open_folder(folder)
    with pytest.raises(ModelFileError) as caught:
        load_weights(folder)
    told = caught.value.problems
    assert {problem.split(":")[0] for problem in told} == set(BAD_VALUES)
    assert "norm.weight: 1 of 32 values are NaN, infinite or out of range" in told


def test_largest_scale_and_codes_are_numbers(quantised: Path, tmp_path: Path) -> None:
    folder = copy(quantised, tmp_path)
    file = raw(folder)
    file.bytes_of("layers.0.attn.wkv.weight")[:] = b"\x7e" * 1024
    file.bytes_of("layers.0.attn.wkv.scale")[:] = b"\xf6"
    file.write()
    _, weights = load_weights(folder)
    assert torch.equal(weights.layers[0].attention.kv, torch.full((32, 32), 448 * 2.0**119))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_are_told_or_load(
    quantised: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """A changed value is a value; anything else is told, and by no other error."""
    folder = tmp_path / "flipped"
    shutil.copytree(quantised, folder, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(["model.safetensors", "model.safetensors", "config.json"]))
    content = bytearray((quantised / name).read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0] if name != "config.json" else len(content)
    ends = st.sampled_from([header, header, len(content)])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, data.draw(ends) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    weights = None
    with contextlib.suppress(ModelFileError):
        _, weights = load_weights(folder)
    if weights is not None:
        assert weights.layers[0].attention.q_a.isfinite().all()
