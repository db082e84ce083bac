"""The command line: what people and programs see of it, and how it ends."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import engine.generate
from engine.answer_display import describe, describe_moves, remote_summary_line, summary_line
from engine.chat import Message, encode_chat, encode_text
from engine.client import AnswerReport
from engine.errors import InvalidRequest
from engine.generate_options import choose_place, choose_waits
from engine.load import open_model
from engine.question import Question
from engine.question_prompt import encode_question
from engine.remote_answer import RemoteAnswer
from engine.sampling import Sampling
from kvstore.admin.local_cluster import LocalCluster
from tests.engine.command_line import Ended, run_here
from tests.engine.conftest import OpenTiny
from tests.engine.memory_store import FailingStore, MemoryStore
from tests.engine.tiny_model import TinyModel
from tests.engine.waiting import wait_until

DOCUMENT = "The quick brown fox jumps over the lazy dog, again and again. " * 8
V41_MINI = Path(__file__).parents[2] / "models/v41-mini"
COMMAND = [sys.executable, "-m", "engine.generate", "--threads", "1"]


def run_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50)


def run(*arguments: str | Path) -> Ended:
    return run_here(engine.generate, *arguments)


def answer_of(done: Ended | subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def run_json(*arguments: str | Path) -> dict[str, Any]:
    return answer_of(run(*arguments, "--json"))


@pytest.mark.slow
def test_second_process_hits_what_the_first_has_saved_on_real_nodes(
    tiny_path: Path, tmp_path: Path
) -> None:
    document = tmp_path / "document.txt"
    document.write_text(DOCUMENT, encoding="utf-8")
    with LocalCluster.start(
        tmp_path / "c", nodes=3, k=2, m=1, target_size_bytes=64 << 20
    ) as cluster:
        options: list[str | Path] = ["--model", tiny_path, "--cluster", cluster.cluster_path]
        options += ["--max-tokens", "150"]
        ask = [*options, "--prompt-file", document, "--question", "What jumps?"]
        cold = run_json(*ask)
        hit = answer_of(run_process(*ask, "--json"))
        (tmp_path / "hit.json").write_text(json.dumps(hit), encoding="utf-8")
        follow_up = [*options, "--follow-up-of", tmp_path / "hit.json", "--question", "Why?"]
        further = run_json(*follow_up)
    full_blocks = (cold["prompt_tokens"] + len(cold["token_ids"])) // 128
    assert cold["blocks"] == dict.fromkeys(cold["blocks"], 0) | {"stored": full_blocks}
    assert cold["hit_tokens"] == 0
    assert hit["hit_tokens"] == (hit["prompt_tokens"] - 1) // 128 * 128 > 300
    assert hit["token_ids"] == cold["token_ids"]
    assert further["hit_tokens"] == full_blocks * 128
    assert further["prompt_token_ids"][: cold["prompt_tokens"]] == cold["prompt_token_ids"]
    assert [cold["store_errors"], hit["store_errors"], further["store_errors"]] == [0, 0, 0]


def test_people_see_the_answer_and_one_line_of_numbers(tiny_path: Path) -> None:
    plain = run("--model", tiny_path, "--prompt", "Hi", "--max-tokens", "4")
    assert (plain.returncode, plain.stderr) == (0, "")
    *answer, summary = plain.stdout.splitlines()
    as_json = run_json("--model", tiny_path, "--prompt", "Hi", "--max-tokens", "4")
    assert "\n".join(answer) == as_json["answer"]
    assert f"prompt {as_json['prompt_tokens']} tokens, hit 0; first token " in summary


def test_json_holds_everything_the_module_promises(tiny_path: Path) -> None:
    answer = run_json("--model", tiny_path, "--prompt", "Hi", "--compute", "float32", "--seed", "5")
    assert set(answer) == {
        *("answer", "token_ids", "prompt_token_ids", "finish_reason", "prompt_tokens"),
        "is_cut_by_context",
        *("matched_tokens", "hit_tokens", "replay_tokens", "rejected_shards", "timings"),
        *("decode_tokens_per_s", "load_s", "blocks", "store_errors", "model", "compute"),
    }
    assert set(answer["timings"]) == {
        *("match_s", "fetch_s", "swap_in_s", "prefill_s", "ttft_s", "decode_s"),
    }
    assert set(answer["blocks"]) == {"stored", "known", "failed", "dropped", "pending"}
    assert (answer["model"], answer["compute"]) == (str(tiny_path), "float32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "  "], "prompt: given nothing"),
        (["--prompt-file", "no-such-file"], "prompt file: no such file: no-such-file"),
        (["--prompt-file", "/"], "prompt file: is a folder: /"),
        (["--prompt", "x", "--follow-up-of", "nope"], "earlier answer: no such file: nope"),
        (
            ["--prompt", "x", "--model", "/"],
            "model file / has 2 problem(s): config.json: there is no",
        ),
        (["--prompt", "x", "--model", "no-such-model"], "there is no such file"),
        (["--prompt", "x", "--top-p", "0"], "top_p: given 0.0, expected above 0, at most 1"),
    ],
)
def test_mistakes_of_a_user_are_one_line_on_stderr(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


SAYING_ALL = """
import json, sys
import engine.generate
for words in json.loads(sys.argv[1]):
    sys.argv = ["engine.generate", *words]
    try:
        engine.generate.main()
    except SystemExit as end:
        print(end.code, "torch" in sys.modules, flush=True)
"""


def test_mistakes_of_a_user_are_said_before_the_tensor_library_is_loaded(tmp_path: Path) -> None:
    ask = ["--prompt", "x"]
    mistakes = [
        (2, "prompt: given nothing", []),
        (2, "prompt file: no such file", ["--prompt-file", "no-such-file"]),
        (2, "--max-tokens: given 0", [*ask, "--max-tokens", "0"]),
        (2, "top_p: given 0.0", [*ask, "--top-p", "0"]),
        (2, "model file no-such-model has", [*ask, "--model", "no-such-model"]),
        (2, "--agent: given /dev/null, which is no socket", [*ask, "--agent", "/dev/null"]),
        (2, "Invalid value for '--compute'", [*ask, "--compute", "int4"]),
        (2, "--engines: given 'nowhere'", [*ask, "--engines", "nowhere"]),
        (3, "no cluster map at", [*ask, "--cluster", str(tmp_path / "none.toml")]),
    ]
    done = subprocess.run(
        [sys.executable, "-c", SAYING_ALL, json.dumps([words for *_, words in mistakes])],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout.splitlines() == [f"{code} False" for code, *_ in mistakes]
    found = [done.stderr.find(message) for _, message, _ in mistakes]
    assert -1 not in found, done.stderr
    assert found == sorted(found)


def test_command_without_a_prompt_ends_with_one_line_on_stderr() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "engine.generate: prompt: given nothing, expected --prompt, --prompt-file or --question\n"
    )


def test_cluster_map_that_cannot_be_used_has_the_exit_code_it_has_for_cachalot(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("format = 99\n")
    for path, message in ((tmp_path / "none.toml", "no cluster map at"), (broken, "mistake")):
        done = run("--prompt", "x", "--cluster", path)
        assert (done.returncode, done.stdout) == (3, "")
        assert len(done.stderr.splitlines()) == 1
        assert message in done.stderr


def test_unusable_model_file_is_one_line_however_much_is_wrong(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("no model")
    done = run("--prompt", "x", "--model", notes)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "not a readable GGUF file" in done.stderr


def test_model_without_template_goes_on_with_the_text() -> None:
    answer = run_json("--model", V41_MINI, "--prompt", "import argparse", "--max-tokens", "4")
    tokenizer = open_model(V41_MINI).tokenizer
    assert answer["prompt_token_ids"] == encode_text(tokenizer, "import argparse")
    assert (answer["compute"], len(answer["token_ids"])) == ("float32", 4)
    assert answer["answer"] == tokenizer.decode(answer["token_ids"])


def test_question_to_a_model_without_template_is_its_text_behind_what_was_there() -> None:
    tokenizer = open_model(V41_MINI).tokenizer
    follow_up = Question(text="import os", system=None, earlier=([0, 300], [301, 1]))
    assert encode_question(tokenizer, follow_up) == [0, 300, 301, *tokenizer.encode("import os")]
    with pytest.raises(
        InvalidRequest, match="system text: given 'Be brief', expected a model with"
    ):
        encode_question(tokenizer, Question(text="x", system="Be brief", earlier=None))


@pytest.fixture
def worker_socket(tiny_path: Path, tmp_path: Path) -> Iterator[Path]:
    """The socket of an engine worker that prefills and decodes, in a folder of its own."""
    path = tmp_path / "engines" / "b01.sock"
    path.parent.mkdir()
    command = [sys.executable, "-m", "engine.worker", "--role", "both", "--threads", "1"]
    command += ["--model", str(tiny_path), "--listen", str(path), "--grace", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "the worker ended before it was ready"
        yield path
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=50)


@pytest.mark.slow
def test_engine_workers_give_the_answer_that_the_model_gives_here(
    tiny_path: Path, worker_socket: Path, open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("--model", tiny_path, "--engines", worker_socket.parent, "--prompt", "Hi")
    there = run_json(*ask, "--max-tokens", "40", "--temperature", "1.2", "--seed", "3")
    here = open_tiny().generate(
        there["prompt_token_ids"], max_tokens=40, sampling=Sampling(temperature=1.2, seed=3)
    )
    assert (there["token_ids"], there["answer"]) == (here.token_ids, here.text)
    assert there["finish_reason"] == here.finish_reason
    assert set(there) == {
        *("answer", "token_ids", "prompt_token_ids", "finish_reason", "prompt_tokens"),
        "is_cut_by_context",
        *("decode_tokens_per_s", "timings", "moves", "tried", "engines", "model"),
    }
    assert set(there["timings"]) == {"ttft_s", "decode_s"}
    assert (there["moves"], there["tried"], len(there["engines"])) == (0, [], 1)
    with monkeypatch.context() as patched:
        # It is told before any model is read.
        patched.setattr("engine.load.open_model", None)
        other = run("--model", V41_MINI, *ask[2:])
    assert (other.returncode, other.stdout) == (2, "")
    (line,) = other.stderr.splitlines()
    assert line.startswith("engine.generate: model: given v41-mini, a folder, expected ")
    assert f" expected {tiny_path.name} (" in line


def test_absent_workers_are_one_line_on_stderr(tiny_path: Path, tmp_path: Path) -> None:
    done = run("--model", tiny_path, "--prompt", "x", "--engines", tmp_path / "none.sock")
    assert (done.returncode, done.stdout) == (4, "")
    assert len(done.stderr.splitlines()) == 1
    assert "no engine worker is there: " in done.stderr


def test_worker_that_says_nothing_is_waited_for_as_long_as_the_options_say(
    tiny_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "deaf.sock"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        ask = ("--model", tiny_path, "--prompt", "x", "--engines", path)
        done = run(*ask, "--first-token-deadline", "0.25", "--patience", "0")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == (
        "engine.generate: no engine worker goes on with it for 0 s:"
        f" {path}: nothing from it for 0.25 s\n"
    )


def test_waits_without_workers_are_refused() -> None:
    nowhere = choose_place(agent=None, cluster="none", engines=None)
    with pytest.raises(InvalidRequest, match="--token-deadline: given without --engines, expected"):
        choose_waits(nowhere, first_token_s=None, between_tokens_s=5.0, patience_s=None)
    there = choose_place(agent=None, cluster="none", engines="engines")
    said = choose_waits(there, first_token_s=2.0, between_tokens_s=None, patience_s=0.0)
    assert said == {"first_token_s": 2.0, "patience_s": 0.0}


def test_one_place_is_to_be_named_for_help() -> None:
    with pytest.raises(InvalidRequest, match="store: given both --agent and --engines, expected"):
        choose_place(agent=Path("a.sock"), cluster="none", engines="engines")
    with pytest.raises(InvalidRequest, match="store: given both --cluster and --engines, expected"):
        choose_place(agent=None, cluster="c.toml", engines="engines")


def test_summary_of_workers_names_the_hit_and_what_was_tried() -> None:
    report = AnswerReport(
        ttft_s=0.5, decode_s=2.0, moves=1, tried=("p01: gone",), engines=({"hit_tokens": 256},)
    )
    answer = RemoteAnswer(
        prompt_ids=[1] * 300, token_ids=[5, 6, 7], text="x", finish_reason="length", report=report
    )
    assert remote_summary_line(answer, 3) == (
        "[prompt 300 tokens, hit 256; first token 0.50 s; 3 tokens, 1/s; moved once; "
        "tried again after: p01: gone]"
    )
    assert "1/s; ended by the model's context; moved once;" in remote_summary_line(answer, 4)


def test_summary_of_workers_shows_what_was_replayed() -> None:
    engine = {"hit_tokens": 1280, "replay_tokens": 128}
    report = AnswerReport(ttft_s=0.5, decode_s=2.0, moves=1, tried=(), engines=(engine, {}))
    answer = RemoteAnswer(
        prompt_ids=[1] * 1600, token_ids=[5], text="x", finish_reason="length", report=report
    )
    line = remote_summary_line(answer, 1)
    assert line.startswith("[prompt 1600 tokens, hit 1280 (and 128 behind it replayed); first")


def test_moves_are_told_in_words() -> None:
    assert [describe_moves(moves) for moves in range(4)] == [
        *("never moved", "moved once", "moved twice", "moved 3 times")
    ]


def test_answer_that_the_context_ends_says_so(tmp_path: Path) -> None:
    short = TinyModel(metadata={"llama.context_length": 160}).write(tmp_path / "short.gguf")
    ask = ("--model", short, "--prompt", "Hi")
    whole, cut = (run_json(*ask, "--max-tokens", number) for number in ("2", "500"))
    assert not whole["is_cut_by_context"]
    assert cut["prompt_tokens"] + len(cut["token_ids"]) == 160
    assert (cut["finish_reason"], cut["is_cut_by_context"]) == ("length", True)
    assert "; ended by the model's context; " in run(*ask, "--max-tokens", "500").stdout


def test_answer_of_no_tokens_is_refused_before_the_model_is_read() -> None:
    done = run("--prompt", "x", "--model", "no-such-model", "--max-tokens", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "engine.generate: --max-tokens: given 0, expected 1 or more\n"


def test_dead_nodes_are_named_on_stderr_when_they_kept_the_cache_from_the_answer(
    tiny_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    with LocalCluster.start(folder, nodes=3, k=2, m=1, target_size_bytes=64 << 20) as cluster:
        path = cluster.cluster_path
    ask = ("--model", tiny_path, "--cluster", path, "--max-tokens", "2")
    done = run(*ask, "--prompt", DOCUMENT)
    assert done.returncode == 0
    assert done.stderr == (
        "engine.generate: 0 of 3 nodes answer; the answer was computed without the cache"
        f" (start them with `cachalot up --dir {folder}`)\n"
    )


def test_agent_that_is_away_is_told_of_when_it_was_not_needed(
    tiny_path: Path, tmp_path: Path
) -> None:
    agent = tmp_path / "none.sock"
    ask = ("--model", tiny_path, "--agent", agent, "--max-tokens", "2", "--prompt")
    done = run(*ask, "Hi")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"engine.generate: agent {agent}: ")
    assert line.endswith("; it was not needed for this answer")


def test_help_lists_the_exit_codes() -> None:
    words = run("--help").stdout.split("Exit codes:")[1].split()
    assert [word for word in words if word.isdigit()] == ["0", "1", "2", "3", "4", "130"]


def test_help_names_the_agent_as_the_other_way_to_the_store() -> None:
    words = " ".join(run("--help").stdout.split())
    assert "--agent <path> socket of this host's agent, in place of --cluster --cluster <path>" in (
        words
    )


def test_interrupt_ends_quietly_with_its_exit_code(tiny_path: Path) -> None:
    """It comes in the middle of the answer: that has more text than its pipe has room for."""
    reader, writer = os.pipe()
    room_bytes = 64
    size_bytes = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1)
    os.write(writer, bytes(size_bytes - room_bytes))
    words = ("--model", str(tiny_path), "--prompt", "Hi", "--max-tokens", "900")
    with (
        os.fdopen(reader, "rb") as out,
        subprocess.Popen(
            [*COMMAND, *words, "--temperature", "0.2"],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        os.close(writer)
        wait_until(lambda: unread_bytes(reader) > size_bytes - room_bytes)
        process.send_signal(signal.SIGINT)
        assert len(out.read()) <= size_bytes + room_bytes
        _, error = process.communicate(timeout=50)
    assert b"Traceback" not in error
    assert process.returncode == 130


def unread_bytes(pipe: int) -> int:
    """What is in a pipe."""
    count = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)


@pytest.mark.parametrize("help_from", [None, "--engines"])
def test_file_that_no_prompt_can_hold_is_refused_before_it_is_read_or_made_tokens_of(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, help_from: str | None
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError("it goes on")

    monkeypatch.setattr("engine.tokenizer.Tokenizer.encode", fail)
    monkeypatch.setattr("engine.llm.load_llm", fail)
    loaded = open_model(tiny_path)
    tokens, token_bytes = loaded.context_tokens - 1, loaded.tokenizer.token_bytes_max
    file = tmp_path / "large"
    file.touch()
    os.truncate(file, 1 << 40)
    place: list[str | Path] = [] if help_from is None else [help_from, tmp_path / "none.sock"]
    done = run("--model", tiny_path, "--prompt-file", file, *place)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"engine.generate: prompt file: given {1 << 40} bytes in {file}, expected a file of "
        f"at most {tokens * token_bytes} bytes, blanks at its ends included: a prompt has at most "
        f"{tokens} tokens, of at most {token_bytes} bytes\n"
    )


def test_question_goes_to_the_model_as_one_user_turn(open_tiny: OpenTiny) -> None:
    llm = open_tiny()
    question = Question(text="Hi", system="Be brief", earlier=None)
    expected = encode_chat(llm.tokenizer, [Message("system", "Be brief"), Message("user", "Hi")])
    assert encode_question(llm.tokenizer, question) == expected


def test_summary_names_what_could_not_be_saved_and_store_errors(open_tiny: OpenTiny) -> None:
    llm = open_tiny(FailingStore("save"))
    generation = llm.generate([5] * 300, max_tokens=2)
    llm.close()
    errors = llm.store_faults.count
    assert "blocks stored 0, known 0, failed 2; store errors 1]" in summary_line(
        generation, 2, store_errors=errors
    )
    assert describe(generation, 2, store_errors=errors)["store_errors"] == 1
    sound = open_tiny(MemoryStore())
    generation = sound.generate([5] * 300, max_tokens=2)
    sound.close()
    line = summary_line(generation, 2, store_errors=sound.store_faults.count)
    assert line.endswith("blocks stored 2, known 0, failed 0]")
