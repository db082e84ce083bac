"""Where the web page of a cluster is, and which file has the token that it asks for. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..cluster.entities import ClusterMap
from .control_client import find_endpoints, parse_control_url
from .control_options import default_token_path
from .worker_status import WorkersStatus, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPage:
    """The page that one worker serves; that of any other shows the same cluster."""

    url: str
    token_path: Path

    def describe(self) -> str:
        """One line for a person."""
        return f"web page: {self.url} (asks for the token in {self.token_path})"

    def render_json(self) -> dict[str, str]:
        return {"url": self.url, "token_path": str(self.token_path)}


def find_web_page(
    cluster_map: ClusterMap,
    cluster_path: Path,
    token_file: Path | None = None,
    workers: WorkersStatus | None = None,
    control: str | None = None,
) -> WebPage | None:
    """The page of the first worker that runs, or of `control`; None if the map names no address.

    None too if no control API answers at `control`. Without `workers` nobody knows which of them
    run, and the first in the map is taken.
    """
    if workers is not None and workers.silent_control:
        return None
    endpoints = find_endpoints(cluster_map) if control is None else [parse_control_url(control)]
    if workers is not None and control is None:
        absent = {WorkerState.NOT_RUNNING, WorkerState.NO_ANSWER}
        # One that has not loaded its API yet does so when it is looked at.
        endpoints = [one for one in endpoints if workers.state_of(one.node) not in absent]
    if not endpoints:
        return None
    token_path = token_file or default_token_path(cluster_path)
    return WebPage(url=f"http://{endpoints[0].address}/", token_path=token_path)
