"""Asks one agent of this host, over its own socket: also one that no directory knows."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import msgspec

from ..agent_messages import (
    HEAD,
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    Answer,
    AskStatus,
    Hello,
    Refused,
    StatusTold,
    answer_decoder,
    pack_message,
)
from ..errors import AgentRefused, AgentUnreachable

CLIENT = "cachalot status"
TAKES_WHOM = "an agent takes only processes of its own user, or root's"
CLOSED = (
    f"it closed the connection: it is no agent's socket, or does not take this user ({TAKES_WHOM})"
)


def ask_agent_at(path: Path, deadline_s: float) -> dict[str, Any]:
    """The status document of the agent behind a socket. Raises AgentUnreachable, AgentRefused."""
    due_s = time.monotonic() + deadline_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(deadline_s)
            connection.connect(str(path))
            hello = Hello(version=PROTOCOL_VERSION, client=CLIENT)
            connection.sendall(pack_message(1, hello) + pack_message(2, AskStatus()))
            for _ in range(2):
                answer = _read_answer(connection, path, due_s)
                if isinstance(answer, StatusTold):
                    return _parse(answer.status, path)
                if isinstance(answer, Refused):
                    raise AgentRefused(path, f"{answer.what}: given {answer.given}")
    except TimeoutError as error:
        raise AgentUnreachable(path, f"no answer within {deadline_s:.2f} s") from error
    except AgentUnreachable:
        raise
    except BlockingIOError as error:
        # A Unix socket whose queue is full refuses at once instead of making us wait.
        raise AgentUnreachable(path, "it does not take connections; many wait") from error
    except OSError as error:
        raise AgentUnreachable(path, describe_failure(path, error)) from error
    raise AgentUnreachable(path, "it does not answer with its status")


def describe_failure(path: Path, error: OSError) -> str:
    """Why nobody can be reached behind a path, for the person who gave it."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "no such socket; is the agent running?"
    if isinstance(error, PermissionError):
        return f"{error.strerror}; {TAKES_WHOM}"
    if isinstance(error, ConnectionRefusedError):
        if not _is_socket(path):
            return "is no socket"
        return "nobody listens there; the agent that made it has ended"
    if isinstance(error, ConnectionError):
        return CLOSED
    return error.strerror or str(error)


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return True  # it was there a moment ago


def _read_answer(connection: socket.socket, path: Path, due_s: float) -> Answer:
    """One message. The descriptor beside the first one is not taken, so the kernel closes it."""
    size, _ = HEAD.unpack(_read(connection, HEAD.size, path, due_s))
    if size > MESSAGE_BYTES_MAX:
        raise AgentUnreachable(path, f"an answer of {size} bytes, at most {MESSAGE_BYTES_MAX}")
    try:
        return answer_decoder.decode(_read(connection, size, path, due_s))
    except msgspec.DecodeError as error:
        raise AgentUnreachable(path, f"its answer is not understood: {error}") from error


def _read(connection: socket.socket, size: int, path: Path, due_s: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        left_s = due_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(size - len(found))
        if not part:
            raise AgentUnreachable(path, CLOSED)
        found += part
    return bytes(found)


def _parse(document: bytes, path: Path) -> dict[str, Any]:
    try:
        status = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise AgentUnreachable(path, "its status is not JSON") from error
    if not isinstance(status, dict):
        raise AgentUnreachable(path, "its status is not an object")
    return status
