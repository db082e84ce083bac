"""The retention policy as this node knows it, and its file: soft state that survives a restart.

The node itself only obeys `draining`; it keeps the rest for whoever asks, so that a policy is still
known when all workers are down. What a policy means, and how nodes come to agree on one, is not
decided here. The file's format stands in docs/formats/policy.md.
"""

from __future__ import annotations

import json
import logging
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
RETRY_S = 5.0
"""A policy that could not be written is tried again after so long."""


class PolicyStore:
    """The newest policy this node has seen. Belongs to the event loop; `save` may run anywhere.

    `folder` is that of the node's first target. A node without targets has none, keeps nothing, and
    is asked by nobody.

    A policy takes effect before it is written: a disk that is full or hangs must not keep out one
    that would empty it. Room for the next document is reserved while there is some.
    """

    def __init__(self, folder: Path | None, disk: Disk) -> None:
        self._path = None if folder is None else folder / POLICY_NAME
        self._disk = disk
        self.turn = Turn()
        """One file is written at a time, and the newest last."""
        self.current = self._load()
        self._saved = self.current
        self._retry_at_s = 0.0
        self._has_failed = False
        self._reserve()

    @property
    def is_saved(self) -> bool:
        """Whether a restart would find the policy of now."""
        return self._saved is self.current

    def is_draining(self, node: str) -> bool:
        """Whether that node is to take no more shards."""
        return node in self.current.draining

    def take(self, policy: RetentionPolicy) -> None:
        """Follow `policy` from now on; it is still to be saved."""
        self.current = policy

    def is_save_due(self, now_s: float) -> bool:
        """Whether the policy of now is still to be written, and it is time to try."""
        return not self.is_saved and now_s >= self._retry_at_s

    def note_saved(self, policy: RetentionPolicy) -> None:
        """`save` of that policy has succeeded."""
        self._saved = policy
        self._retry_at_s = 0.0
        if self._has_failed:
            log.info("policy written version=%d, after it could not be", policy.version)
        self._has_failed = False

    def note_failed(self, policy: RetentionPolicy, error: OSError, now_s: float) -> None:
        """`save` of that policy has failed; logged the first time."""
        self._retry_at_s = now_s + RETRY_S
        if not self._has_failed:
            text = "policy not written version=%d, tried again every %g s: %s"
            log.error(text, policy.version, RETRY_S, error.strerror or error)
        self._has_failed = True

    def save(self, policy: RetentionPolicy) -> None:
        """Put `policy` into the file, whole or not at all; blocks. OSError if that fails."""
        assert self._path is not None, "who asks has greeted a target"
        content = memoryview(pack_policy_file(policy))
        temporary = self._path.with_suffix(".tmp")
        descriptor = self._open_or_create(temporary)
        try:
            self._disk.write(descriptor, [content], 0)
            self._disk.truncate(descriptor, len(content))
            self._disk.sync(descriptor)
        finally:
            self._disk.close(descriptor)
        self._disk.rename(temporary, self._path)
        self._disk.sync_folder(self._path.parent)
        self._reserve()

    def _reserve(self) -> None:
        """Have the disk keep room for the next document, if it has any; blocks."""
        if self._path is None:
            return
        try:
            descriptor = self._open_or_create(self._path.with_suffix(".tmp"))
            try:
                self._disk.allocate(descriptor, FILE_BYTES_MAX)
            finally:
                self._disk.close(descriptor)
        except OSError as error:
            log.warning("no room kept for the next policy: %s", error.strerror or error)

    def _open_or_create(self, path: Path) -> int:
        try:
            return self._disk.open(path)
        except FileNotFoundError:
            return self._disk.create(path)

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
