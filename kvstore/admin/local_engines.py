"""The engine workers of a local cluster: `cachalot engine` processes on this machine.

They are no part of the map: nodes and agents know nothing of them. What an engine holds is soft, so
one that was killed is started again and finds in the store what others saved. The engine's package
is not imported here; its process is all that is known of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import InvalidArgument, StoreError
from ..model_place import find_model_faults
from ..socket_file import SOCKET_PATH_BYTES_MAX, remove_stale_socket
from .engine_plan import (
    GRACE_S,
    EngineWishes,
    LocalEngine,
    choose_engines,
    choose_stop_s,
    name_engines,
    option_words,
)
from .exit_codes import ExitCode
from .local_folder import DamagedEngineOptions, LocalEngineOptions, LocalFolder, naming_file
from .local_processes import LocalProcesses
from .new_token import make_token_file
from .node_process import ENGINE, StopDeadlines
from .node_start import CODE_ROOT, StartingNode, spawn_recorded
from .node_stop import StoppedNode, stop_nodes
from .output import write_remark
from .quantities import count_of

ENGINE_START_DEADLINE_S = 180.0
"""A model is read and checked."""
CHECK_DEADLINE_S = 60.0
STOP_DEADLINES = StopDeadlines(term_s=20.0)
"""The least; `stop_engines` leaves them the time that their drain may take."""


class LocalEngines(LocalProcesses):
    """Starts, finds and ends the engines of one local cluster. Belongs to one thread."""

    def __init__(self, folder: LocalFolder) -> None:
        super().__init__(folder.of(ENGINE), STOP_DEADLINES)

    @property
    def wanted(self) -> list[LocalEngine]:
        """Those that the folder is to have, alive or not."""
        return name_engines(self._folder.read_engine_options())

    @property
    def model(self) -> str:
        """Of all of them; empty if there are none."""
        return self._folder.read_engine_options().model

    @property
    def options(self) -> Mapping[str, str | None]:
        """The same, beside those that `engine_command` gives."""
        return self._folder.read_engine_options().options

    def socket(self, name: str) -> Path:
        """Where clients reach an engine."""
        return self._folder.socket_path(name)

    def plan(self, wishes: EngineWishes) -> LocalEngineOptions:
        """The engines that the folder is to have, after what was asked for now and before. Raises
        InvalidArgument for what cannot be started."""
        known = self._folder.read_engine_options()
        running = [one.name for one in name_engines(known) if self.pid(one.name) is not None]
        wanted = choose_engines(known, wishes, running=running)
        check_engines(self._folder, wanted)
        return wanted

    def bring_up(
        self,
        wishes: EngineWishes,
        *,
        agents: Sequence[Path],
        deadline_s: float = ENGINE_START_DEADLINE_S,
    ) -> list[str]:
        """Start the engines of the plan that are down; their names.

        `agents`: sockets, which the engines share out among them. Raises InvalidArgument,
        NodeStartFailed: the ones started by this call are stopped again then, and the folder keeps
        the plan that it had.
        """
        with self._folder.locked():
            known = self._folder.read_engine_options()
            wanted = self.plan(wishes)
            engines = name_engines(wanted)
            missing = [one for one in engines if self.pid(one.name) is None]
            if not missing:
                if known != wanted:  # its file was lost while they ran
                    self._folder.write_engine_options(wanted)
                return []
            self._folder.nodes_path.mkdir(exist_ok=True)
            with naming_file(self._folder.ticket_key_path):
                make_token_file(self._folder.ticket_key_path)
            # Before they run, so that a command that is killed leaves none that nobody knows of.
            self._folder.write_engine_options(wanted)
            write_remark(f"starting {count_of(len(missing), 'engine')}, of {wanted.model}")
            numbers = {one.name: number for number, one in enumerate(engines)}

            def spawn(name: str) -> StartingNode:
                agent = agents[numbers[name] % len(agents)]
                return self._spawn(engines[numbers[name]], wanted, agent)

            try:
                self._start_all([one.name for one in missing], spawn, (), deadline_s)
            except BaseException:
                self._folder.write_engine_options(known)
                raise
            return [one.name for one in missing]

    def stop(
        self, names: Sequence[str], deadlines: StopDeadlines | None = None
    ) -> list[StoppedNode]:
        """End engines cleanly. May be called again. Raises NodeError."""
        stopped = stop_engines(self._folder, names, deadlines or self._stop_deadlines)
        self._reap()
        return stopped

    def _spawn(self, engine: LocalEngine, options: LocalEngineOptions, agent: Path) -> StartingNode:
        command = engine_command(self._folder, engine, options, agent)
        address = str(self._folder.socket_path(engine.name))
        return spawn_recorded(self._folder, engine.name, address, command)


def stop_engines(
    folder: LocalFolder, names: Sequence[str], deadlines: StopDeadlines
) -> list[StoppedNode]:
    """As `stop_nodes`, of a folder of engines, which are not killed while they may still drain;
    also removes the sockets that killed ones left."""
    try:
        options = folder.read_engine_options().options
    except DamagedEngineOptions as error:
        # It says how long they may drain; they have the usual time then, and do end.
        write_remark(str(error))
        options = {}
    term_s = choose_stop_s(options, deadlines.term_s)
    stopped = stop_nodes(folder, names, replace(deadlines, term_s=term_s))
    for one in stopped:
        remove_stale_socket(folder.socket_path(one.node))
    return stopped


def engine_command(
    folder: LocalFolder, engine: LocalEngine, options: LocalEngineOptions, agent: Path
) -> list[str]:
    """The command line of an engine; `node_process` recognises it by name and socket."""
    command = [sys.executable, "-m", ENGINE.module, "--name", engine.name, "--role", engine.role]
    command += ["--listen", str(folder.socket_path(engine.name))]
    command += ["--model", options.model, "--agent", str(agent), "--grace", str(GRACE_S)]
    command += ["--ticket-key", str(folder.ticket_key_path)]
    # Behind the grace, which they may say too: the last one counts.
    return command + option_words(options.options)


def check_engines(folder: LocalFolder, options: LocalEngineOptions) -> None:
    """Raises InvalidArgument for what every engine would refuse, before any is started."""
    faults = find_model_faults(options.model)
    if faults:
        what = "; ".join(faults) if os.path.exists(options.model) else "which is not there"
        raise InvalidArgument(
            "--model",
            given=f"{options.model}, {what}",
            expected="a GGUF file, or a folder with config.json and its .safetensors files",
        )
    for engine in name_engines(options):
        length = len(os.fsencode(folder.socket_path(engine.name)))
        if length > SOCKET_PATH_BYTES_MAX:
            raise InvalidArgument(
                "folder",
                given=f"{folder.path}, where the socket of engine {engine.name} would have a path"
                f" of {length} bytes",
                expected=f"a folder with a path that is {length - SOCKET_PATH_BYTES_MAX} bytes"
                f" shorter: a Unix socket's may have {SOCKET_PATH_BYTES_MAX}",
            )


def check_worker_options(options: Mapping[str, str | None], *, model: str) -> None:
    """Raises InvalidArgument for options that a worker refuses, in its own words. A worker that
    only reads them is asked: nothing of it is known here. Raises StoreError if it does not say.

    It would refuse a model too that cannot be one, of which nothing is asked.
    """
    if find_model_faults(model):
        return
    valued = option_words({name: value for name, value in options.items() if value is not None})
    flags = [[f"--{name}"] for name, value in options.items() if value is None]
    # One at a time, and last: an option that lacks its value takes the next word for it.
    for flag in flags or [[]]:
        _ask_worker(model, [*valued, *flag])


def _ask_worker(model: str, words: Sequence[str]) -> None:
    command = [sys.executable, "-m", ENGINE.module, "--check-only", "--role", "both"]
    command += ["--model", model, "--listen", "any:0", *words]
    try:
        ended = subprocess.run(
            command,
            cwd=CODE_ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StoreError(f"--engine-option: not read after {CHECK_DEADLINE_S:.0f} s") from error
    if not ended.returncode:
        return
    (*_, reason) = ended.stderr.strip().splitlines() or ["it says nothing"]
    if ended.returncode != ExitCode.WRONG_ARGUMENT:
        raise StoreError(
            "--engine-option: `cachalot engine --check-only` ended with exit code"
            f" {ended.returncode}: {reason}"
        )
    # Without who says so.
    reason = reason.partition(": ")[2] or reason
    raise InvalidArgument(
        "--engine-option",
        given=" ".join(words),
        expected=f"options of `cachalot engine`, which says: {reason}",
    )
