"""Asks one engine worker how it is, over its own socket (docs/formats/engine-socket.md). Nothing of
the engine is imported: that message is all that is known of it."""

from __future__ import annotations

import json
import socket
import struct
import time
from pathlib import Path
from typing import Any

import msgspec

PROTOCOL_VERSION = 2
HEAD = struct.Struct("<I")
ANSWER_BYTES_MAX = 1 << 20
QUESTION = msgspec.msgpack.encode({"type": "AskStatus", "version": PROTOCOL_VERSION})


class EngineSilent(Exception):
    """An engine does not say how it is; the text says why."""


def ask_engine_at(path: Path, deadline_s: float) -> dict[str, Any]:
    """Its status document, in values of JSON. Raises EngineSilent."""
    due_s = time.monotonic() + deadline_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(deadline_s)
            connection.connect(str(path))
            connection.sendall(HEAD.pack(len(QUESTION)) + QUESTION)
            (size,) = HEAD.unpack(_read(connection, HEAD.size, due_s))
            if size > ANSWER_BYTES_MAX:
                raise EngineSilent(f"an answer of {size} bytes, at most {ANSWER_BYTES_MAX}")
            answer = _read_answer(_read(connection, size, due_s))
    except TimeoutError:
        raise EngineSilent(
            f"no answer within {deadline_s:g} s; it may be reading its model"
        ) from None
    except OSError as error:
        raise EngineSilent(error.strerror or str(error)) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise EngineSilent("its answer is not understood") from error
    document = answer.get("document")
    if answer.get("type") != "Status" or not isinstance(document, dict):
        raise EngineSilent("it does not answer with its status")
    return document


def _read_answer(body: bytes) -> dict[str, Any]:
    answer = msgspec.msgpack.decode(body, type=dict[str, Any])
    # A message may hold what no JSON has, such as bytes; what comes of it here is shown as JSON.
    found: dict[str, Any] = json.loads(msgspec.json.encode(answer))
    return found


def _read(connection: socket.socket, size: int, due_s: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        left_s = due_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(size - len(found))
        if not part:
            raise EngineSilent("it closed the connection")
        found += part
    return bytes(found)
