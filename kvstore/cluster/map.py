"""The cluster map as a TOML file: read it, check it, write it in one step.

The format is described in docs/formats/cluster-map.md. The writer is ours because the shape is
fixed: it writes what the reader accepts and nothing else, without comments.
"""

import errno
import json
import os
import stat
import tempfile
import tomllib
from pathlib import Path

from ..errors import InvalidClusterMap, MissingClusterMap
from .entities import ClusterMap, CodeShape, Entrypoint, Group, Node, Target, default_write_acks
from .validation import MAP_FORMAT, check_cluster_map

__all__ = [
    "ClusterMap",
    "CodeShape",
    "Entrypoint",
    "Group",
    "Node",
    "Target",
    "default_write_acks",
    "load_cluster_map",
    "parse_cluster_map",
    "render_cluster_map",
    "write_cluster_map",
]

MAP_BYTES_MAX = 4 << 20
MAP_FILE_MODE = 0o644


def load_cluster_map(path: str | Path) -> ClusterMap:
    """Read and check the map at `path`.

    Raises MissingClusterMap if there is none, and InvalidClusterMap with every mistake it has.
    """
    content, _ = read_map_file(path)
    return parse_cluster_map(content, path)


def parse_cluster_map(content: bytes, path: str | Path) -> ClusterMap:
    """The map in the bytes of a file; `path` is only for the message of InvalidClusterMap."""
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidClusterMap(path, [f"not a TOML file in UTF-8: {error}"]) from error
    cluster_map, problems = check_cluster_map(document)
    if cluster_map is None:
        raise InvalidClusterMap(path, problems)
    return cluster_map


def write_cluster_map(cluster_map: ClusterMap, path: str | Path) -> None:
    """Write the map to `path`: readers see the old file or the new one, also after a crash.

    Raises InvalidClusterMap if the map breaks a rule, OSError if the file cannot be written; the
    old file stays as it is then.
    """
    content = render_cluster_map(cluster_map).encode()
    if len(content) > MAP_BYTES_MAX:
        raise InvalidClusterMap(path, [_too_large(len(content))])
    parse_cluster_map(content, path)
    _replace_file(Path(path).resolve(), content)


def render_cluster_map(cluster_map: ClusterMap) -> str:
    """The text of the map's file. Equal maps give equal texts."""
    code = cluster_map.code
    lines = [
        f"format = {MAP_FORMAT}",
        f"epoch = {cluster_map.epoch}",
        f"cluster = {_quoted(cluster_map.cluster)}",
        "",
        "[code]",
        f"k = {code.k}",
        f"m = {code.m}",
        f"write_acks = {code.write_acks}",
    ]
    for node in cluster_map.nodes:
        lines += ["", "[[nodes]]", f"name = {_quoted(node.name)}"]
        lines += [f"address = {_quoted(node.address)}"]
        lines += [] if node.control is None else [f"control = {_quoted(node.control)}"]
    for target in cluster_map.targets:
        lines += ["", "[[targets]]", f"name = {_quoted(target.name)}"]
        lines += [f"node = {_quoted(target.node)}", f"path = {_quoted(target.path)}"]
        lines += [f"size_bytes = {target.size_bytes}"]
    for group in cluster_map.groups:
        names = ", ".join(_quoted(name) for name in group.targets)
        lines += ["", "[[groups]]", f"name = {_quoted(group.name)}", f"targets = [{names}]"]
        lines += [] if group.weight is None else [f"weight = {float(group.weight)!r}"]
    for point in cluster_map.entrypoints:
        lines += ["", "[[entrypoints]]", f"name = {_quoted(point.name)}"]
        lines += [f"address = {_quoted(point.address)}"]
    return "\n".join(lines) + "\n"


def read_map_file(path: str | Path) -> tuple[bytes, os.stat_result]:
    """Content and state of the file, of one and the same file even if it is being replaced."""
    try:
        # Without O_NONBLOCK a named pipe would hold us until somebody writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingClusterMap(path) from error
    except OSError as error:
        raise InvalidClusterMap(path, [f"cannot be opened: {error.strerror}"]) from error
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise InvalidClusterMap(path, ["is not a regular file"])
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAP_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidClusterMap(path, [f"cannot be read: {error.strerror}"]) from error
    finally:
        os.close(descriptor)
    if len(content) > MAP_BYTES_MAX:
        raise InvalidClusterMap(path, [_too_large(max(state.st_size, len(content)))])
    return content, state


def _replace_file(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(
        prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
    )
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, MAP_FILE_MODE)  # mkstemp makes it readable by its owner only
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename last. Some mounts cannot sync a folder; the rename is still atomic there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _quoted(text: str) -> str:
    """A TOML basic string. JSON's escapes are TOML's, except that TOML wants DEL escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _too_large(size_bytes: int) -> str:
    return f"file of {size_bytes} bytes, expected at most {MAP_BYTES_MAX}"
