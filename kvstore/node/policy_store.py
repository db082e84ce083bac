"""The retention policy as this node knows it, and its file: soft state that survives a restart.

The node itself only obeys `draining`; it keeps the rest for whoever asks, so that a policy is still
known when all workers are down. What a policy means, and how nodes come to agree on one, is not
decided here. The file's format stands in docs/formats/policy.md.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from ..errors import InvalidArgument
from ..retention import DEFAULT_POLICY, RetentionPolicy
from ..wire import POLICY_BYTES_MAX
from .disk import Disk
from .waiting import Turn

log = logging.getLogger(__name__)

POLICY_NAME = "policy.json"
FILE_BYTES_MAX = 2 * POLICY_BYTES_MAX


class PolicyStore:
    """The newest policy this node has seen. Belongs to the event loop; `save` may run anywhere.

    `folder` is that of the node's first target. A node without targets has none, keeps nothing, and
    is asked by nobody.
    """

    def __init__(self, folder: Path | None, disk: Disk) -> None:
        self._path = None if folder is None else folder / POLICY_NAME
        self._disk = disk
        self.turn = Turn()
        """One file is written at a time, and the newest last."""
        self.current = self._load()

    def is_draining(self, node: str) -> bool:
        """Whether that node is to take no more shards."""
        return node in self.current.draining

    def save(self, policy: RetentionPolicy) -> None:
        """Put `policy` into the file, whole or not at all; blocks. OSError if that fails."""
        assert self._path is not None, "who asks has greeted a target"
        content = memoryview(pack_policy_file(policy))
        temporary = self._path.with_suffix(".tmp")
        with suppress(FileNotFoundError):
            self._disk.remove(temporary)  # A crash may have left one.
        descriptor = self._disk.create(temporary)
        try:
            self._disk.write(descriptor, [content], 0)
            self._disk.sync(descriptor)
        finally:
            self._disk.close(descriptor)
        self._disk.rename(temporary, self._path)
        self._disk.sync_folder(self._path.parent)

    def _load(self) -> RetentionPolicy:
        """What the file says; the default if there is none, or if it is damaged."""
        if self._path is None:
            return DEFAULT_POLICY
        try:
            descriptor = self._disk.open(self._path)
        except FileNotFoundError:
            return DEFAULT_POLICY
        except OSError as error:
            return self._give_up(str(error.strerror or error))
        try:
            size_bytes = self._disk.size(descriptor)
            if size_bytes > FILE_BYTES_MAX:
                return self._give_up(f"{size_bytes} bytes long, at most {FILE_BYTES_MAX}")
            content = bytearray(size_bytes)
            self._disk.read(descriptor, memoryview(content), 0)
            return parse_policy_file(bytes(content))
        except (InvalidArgument, OSError, ValueError) as error:
            return self._give_up(str(error))
        finally:
            self._disk.close(descriptor)

    def _give_up(self, problem: str) -> RetentionPolicy:
        log.error("policy cannot be used, the default holds path=%s: %s", self._path, problem)
        return DEFAULT_POLICY


def pack_policy_file(policy: RetentionPolicy) -> bytes:
    """The content of a policy file: an object with the document and its checksum."""
    document = policy.to_json()
    head = f'{{"xxh3":"{xxh3_64_hexdigest(document)}","policy":'
    return b"".join((head.encode(), document, b"}\n"))


def parse_policy_file(content: bytes) -> RetentionPolicy:
    """The policy in a file; ValueError or InvalidArgument if it is not whole."""
    try:
        found = json.loads(content)
        if not isinstance(found, dict) or set(found) != {"xxh3", "policy"}:
            raise ValueError("not an object with xxh3 and policy")
        document = json.dumps(found["policy"], ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    policy = RetentionPolicy.parse(document.encode())
    computed = xxh3_64_hexdigest(policy.to_json())
    if found["xxh3"] != computed:
        raise ValueError(f"checksum {found['xxh3']!r:.40}, computed {computed}")
    return policy
