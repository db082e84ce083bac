"""Whether a model could be at a path, told at once: of what is in its files only the first bytes
are looked at. Whoever loads it finds the rest."""

from __future__ import annotations

import os

CONFIG_NAME = "config.json"
TENSORS_SUFFIX = ".safetensors"
GGUF_MAGIC = b"GGUF"


def find_model_faults(path: str | os.PathLike[str]) -> list[str]:
    """What keeps a file from being GGUF, or a folder from being a model; empty if nothing does."""
    try:
        if os.path.isdir(path):
            return _find_folder_faults(path)
        if not os.path.exists(path):
            return ["there is no such file or folder"]
        if not os.path.isfile(path):
            return ["it is no regular file and no folder"]
        with open(path, "rb") as file:
            is_gguf = file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError as error:
        return [f"it cannot be read: {error.strerror or error}"]
    return [] if is_gguf else ["not a readable GGUF file (GGUF magic invalid)"]


def _find_folder_faults(path: str | os.PathLike[str]) -> list[str]:
    names = os.listdir(path)
    faults = [] if CONFIG_NAME in names else [f"{CONFIG_NAME}: there is no such file"]
    if not any(name.endswith(TENSORS_SUFFIX) for name in names):
        faults.append(f"there is no {TENSORS_SUFFIX} file")
    return faults
