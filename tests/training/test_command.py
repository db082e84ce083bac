"""Every program ends with one line and code 2 for what it cannot use; mistakes keep a traceback."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import ModelFileError
from tests.training.small_library import make_library
from training import compressed_ids, curve, evaluate, export, pack, train
from training.command import InvalidInput, ending_in_one_line, reading
from training.mini_config import mini_config
from training.parameters import shapes_of

MODEL = Path(__file__).parents[2] / "models" / "v41-mini"
GARBAGE = np.random.default_rng(7).bytes(5_000)
ABSENT = "absent"

Program = Callable[[list[str]], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small library and the data of a run, of which nothing is wrong."""
    folder = tmp_path_factory.mktemp("sound")
    make_library(folder / "library")
    tokenizer = str(MODEL / "tokenizer.json")
    packed = str(folder / "data" / "corpus.npz")
    pack.main(["--library", str(folder / "library"), "--tokenizer", tokenizer, "--out", packed])
    compressed_ids.main(["--tokenizer", str(folder / "data" / "tokenizer.json")])
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it to spoil, and the working directory."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "garbage").write_bytes(GARBAGE)
    monkeypatch.chdir(tmp_path)
    precision = torch.backends.cuda.matmul.fp32_precision
    yield tmp_path
    # Training sets it for the whole process.
    torch.backends.cuda.matmul.fp32_precision = precision


def complaint(
    program: Program, options: list[str], capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The lines on stderr of a program that must end with code 2."""
    with pytest.raises(SystemExit) as ended:
        program(options)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


CURVE = ["--svg", "curve.svg", "--log"]
EXPORT = ["--data", "data", "--model", "made", "--state"]
PACK = ["--out", "made.npz", "--library"]
TRAIN = ["--out", "run", "--device", "cpu", "--tokens", "16", "--data"]


@pytest.mark.parametrize(
    ("program", "options", "named", "reason"),
    [
        (evaluate.main, ["--model", "garbage"], "model garbage", "given no folder"),
        (evaluate.main, ["--model", ABSENT], f"model {ABSENT}", "where nothing is"),
        (evaluate.main, ["--model", "empty"], "empty/tokenizer.json", "No such file"),
        (evaluate.main, ["--library", ABSENT], f"library {ABSENT}", "where nothing is"),
        (evaluate.main, ["--library", "empty"], "library empty", "0 files to train on"),
        (train.main, [*TRAIN, ABSENT], f"{ABSENT}/tokenizer.json", "No such file"),
        (train.main, [*TRAIN, "empty"], "empty/tokenizer.json", "No such file"),
        (train.main, [*TRAIN, "data", "--resume"], "run/state.pt", "No such file"),
        (train.main, [*TRAIN, "data", "--start-from", ABSENT], ABSENT, "no such folder"),
        (train.main, [*TRAIN, "data", "--out", "garbage"], "garbage", "File exists"),
        (pack.main, [*PACK, ABSENT], f"library {ABSENT}", "where nothing is"),
        (pack.main, [*PACK, "empty"], "library empty", "0 files to train on"),
        (pack.main, [*PACK, "library", "--tokenizer", "garbage"], "tokenizer garbage", "Unicode"),
        (pack.main, [*PACK, "library", "--tokenizer", "empty"], "tokenizer empty", "directory"),
        (compressed_ids.main, ["--tokenizer", ABSENT], f"tokenizer {ABSENT}", "No such file"),
        (compressed_ids.main, ["--tokenizer", "garbage"], "tokenizer garbage", "Unicode"),
        (export.main, [*EXPORT, ABSENT], f"state {ABSENT}", "No such file"),
        (export.main, [*EXPORT, "garbage"], "state garbage", "cannot be read"),
        (export.main, [*EXPORT, "empty"], "state empty", "directory"),
        (export.main, [*EXPORT, "garbage", "--data", ABSENT], ABSENT, "No such file"),
        (curve.main, [*CURVE, ABSENT], f"log {ABSENT}", "No such file"),
        (curve.main, [*CURVE, "empty"], "log empty", "directory"),
        (curve.main, [*CURVE, "garbage"], "line 1 of log garbage", "cannot be read"),
        (curve.main, [*CURVE, "/dev/null"], "log /dev/null", "given no records"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_program_says_what_was_given_and_what_was_expected(
    program: Program,
    options: list[str],
    named: str,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = complaint(program, options, capsys)
    assert named in line
    assert reason in line
    assert "expected" in line or "there is no such folder" in line


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--device", "bogus"),
        ("--device", "meta"),
        ("--device", "cuda:99"),
        ("--target-minutes", "-1"),
        ("--draft-minutes", "nan"),
        ("--draft-minutes", "inf"),
        ("--batch", "0"),
        ("--batch", "-3"),
        ("--batch", "many"),
        ("--tokens", "0"),
        ("--tokens", "-2048"),
        ("--tokens", "5000"),
        ("--steps", "-1"),
        ("--log-every", "0"),
        ("--dropout", "1"),
        ("--seed", "-1"),
        ("--validate-every-s", "-1"),
    ],
)
def test_training_refuses_a_value(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, line = complaint(train.main, [*TRAIN, "data", option, value], capsys)
    assert f"argument {option}: given {value}, expected " in line


def test_training_of_neither_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*TRAIN, "data", "--target-minutes", "0", "--draft-minutes", "0"]
    *_, line = complaint(train.main, options, capsys)
    assert "given 0 for both, expected one above 0" in line


def spoil_arrays(path: Path, **changes: np.ndarray) -> None:
    with np.load(path) as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    np.savez(path, **(kept | changes))


@pytest.mark.parametrize("name", ["corpus.npz", "compressed_ids.npz"])
@pytest.mark.parametrize(
    "content",
    [GARBAGE, b"", b"PK\x03\x04" + GARBAGE, b"\x93NUMPY\x01\0" + GARBAGE, b"{}"],
    ids=["random", "empty", "like zip", "like numpy", "text"],
)
def test_training_refuses_damaged_data(
    name: str, content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data" / name).write_bytes(content)
    (line,) = complaint(train.main, [*TRAIN, "data"], capsys)
    assert f"data/{name}: given what cannot be read" in line
    assert ", expected what training." in line


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("compressed_ids.npz", {"ids": np.zeros(9)}, "ids as float64"),
        ("compressed_ids.npz", {"ids": np.zeros(0, np.int64)}, "0 ids"),
        ("compressed_ids.npz", {"ids": np.arange(9)}, "given 9 tokens, expected 2048"),
        ("compressed_ids.npz", {"ids": np.arange(2_048) - 1}, "leave numbers out"),
        ("compressed_ids.npz", {"tokenizer_sha256": np.array("0")}, "another tokenizer"),
        ("corpus.npz", {"training_ids": np.zeros(9)}, "training_ids as float64"),
        ("corpus.npz", {"held_out_starts": np.zeros(4, np.int64)}, "do not fit"),
        ("corpus.npz", {"held_out_bytes": np.zeros(3, np.int64)}, "of 0 bytes"),
    ],
)
def test_training_refuses_data_of_another_kind(
    name: str,
    changes: dict[str, np.ndarray],
    reason: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil_arrays(folder / "data" / name, **changes)
    (line,) = complaint(train.main, [*TRAIN, "data"], capsys)
    assert reason in line
    assert "expected" in line


def test_training_refuses_ids_outside_the_vocabulary_and_too_few_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = complaint(train.main, [*TRAIN, "data", "--tokens", "4096"], capsys)
    assert "held_out side: given" in line
    assert "expected 4097 tokens or more with ids below 2048" in line
    with np.load(folder / "data" / "corpus.npz") as arrays:
        ids = arrays["training_ids"].copy()
    ids[5] = 2_048
    spoil_arrays(folder / "data" / "corpus.npz", training_ids=ids)
    (line,) = complaint(train.main, [*TRAIN, "data"], capsys)
    assert "ids up to 2048" in line


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-9],
        lambda text: "{}",
        lambda text: json.dumps(
            {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
        ),
        lambda text: text.replace("<|pad|>", "<|gap|>"),
        lambda text: text.replace('"the"', '"th e"'),
    ],
    ids=["cut", "nothing in it", "of words", "other special tokens", "a space in a token"],
)
@pytest.mark.parametrize("program", [compressed_ids.main, pack.main, evaluate.main])
def test_tokenizer_of_another_kind_is_refused(
    program: Program,
    spoil: Callable[[str], str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (MODEL / "tokenizer.json").read_text("utf-8")
    assert spoil(text) != text
    (folder / "empty" / "tokenizer.json").write_text(spoil(text), "utf-8")
    options: dict[Program, list[str]] = {
        compressed_ids.main: ["--tokenizer", "empty/tokenizer.json"],
        pack.main: [*PACK, "library", "--tokenizer", "empty/tokenizer.json"],
        evaluate.main: ["--model", "empty"],
    }
    (line,) = complaint(program, options[program], capsys)
    assert line.startswith("tokenizer empty/tokenizer.json: given ")
    assert line.endswith("expected the tokenizer.json that training.pack writes")


def test_evaluation_refuses_a_folder_in_place_of_a_tokenizer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty" / "tokenizer.json").mkdir()
    (line,) = complaint(evaluate.main, ["--model", "empty"], capsys)
    assert "empty/tokenizer.json: given what cannot be read (Is a directory)" in line


def sound_state() -> dict[str, object]:
    parameters = {name: torch.zeros(shape) for name, shape in shapes_of(mini_config(2_048)).items()}
    return {"parameters": parameters, "progress": {}, "begun": None}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parameters": {}}, "missing, unknown or of another shape"),
        ({"parameters": {"head.weight": torch.zeros(2)}}, "missing, unknown or of another shape"),
        ({"parameters": [1]}, "parameters of another kind"),
    ],
)
@pytest.mark.parametrize("program", [export.main, train.main])
def test_state_of_another_kind_is_refused(
    program: Program,
    changes: dict[str, object],
    reason: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "run").mkdir()
    torch.save(sound_state() | changes, folder / "run" / "state.pt")
    resumed = [*TRAIN, "data", "--resume"]
    options: dict[Program, list[str]] = {
        export.main: [*EXPORT, "run/state.pt"],
        train.main: resumed,
    }
    (line,) = complaint(program, options[program], capsys)
    assert line.startswith("state run/state.pt: given ")
    assert reason in line
    assert not (folder / "made").exists()


STEP = {"part": "target", "kind": "step", "step": 1, "elapsed_s": 2.0, "loss": 3.0}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"part": "target"', "line 2 of log log: given what cannot be read"),
        ("[" * 50_000, "line 2 of log log: given what cannot be read"),
        ("7", "line 2 of log log: given no record"),
        ('{"part": "target"}', "line 2 of log log: given no record"),
        (json.dumps(STEP | {"elapsed_s": "soon"}), "line 2 of log log: given no record"),
        (json.dumps(STEP | {"loss": float("nan")}), "line 2 of log log: given no record"),
        ("", "log log: given 1 records, none of them measured"),
    ],
    ids=["broken", "deep", "number", "no kind", "no time", "no number", "settings only"],
)
def test_curve_names_what_is_no_record(
    content: str, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = json.dumps({"part": "run", "kind": "settings", "captures": True})
    (folder / "log").write_text(f"{settings}\n{content}")
    (line,) = complaint(curve.main, [*CURVE, "log"], capsys)
    assert line.startswith(reason)
    assert "expected" in line
    assert not (folder / "curve.svg").exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InvalidInput("x", given="1\n2", expected="3"), "x: given 1 2, expected 3"),
        (ModelFileError("m", ["torn"]), "model file m has 1 problem(s): torn"),
        (
            PermissionError(13, "Permission denied", "made/x"),
            "made/x: given a path that cannot be used (Permission denied), "
            "expected one that can be read or written",
        ),
    ],
)
def test_known_error_becomes_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @ending_in_one_line()
    def program(options: list[str]) -> None:
        raise error

    assert complaint(program, [], capsys) == [line]


@pytest.mark.parametrize(
    "error", [ValueError("ours"), KeyError("x"), AssertionError(), TypeError()]
)
def test_mistake_of_ours_is_not_hidden(error: Exception) -> None:
    with pytest.raises(type(error)), ending_in_one_line():
        raise error


def test_reason_of_a_library_is_short(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as told, reading("x", tmp_path, expected="y"):
        raise RuntimeError("z\n" * 10_000)
    assert len(str(told.value)) < 400 + len(str(tmp_path))
    assert isinstance(told.value.__cause__, RuntimeError)


def test_training_export_and_curve_need_few_libraries(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('msgspec', 'typer', 'rich', 'xxhash', 'tokenizers'):\n"
        "    sys.modules[name] = None\n"
        "import training.train, training.export\n"
        "from training import curve\n"
        f"curve.main(['--log', {ABSENT!r}, '--svg', 'curve.svg'])\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr.startswith(f"log {ABSENT}: given what cannot be read")
    assert answer.stderr.count("\n") == 1
