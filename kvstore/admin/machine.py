"""What a measurement was made on, for the record beside each figure."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

GIT_DEADLINE_S = 5.0


def describe_machine() -> dict[str, Any]:
    """Commit of the source tree ("unknown" outside one) and the machine, as JSON values."""
    return {
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
    }


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
