"""The agents on the web page, in a real browser, over real agents.

A picture of what was seen is left in build/test-artifacts.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_folder import LocalAgentOptions
from tests.kvstore.admin.browser import CHROMIUM, Page, start_browser
from tests.kvstore.admin.conftest import end_all
from tests.kvstore.admin.control_host import TOKEN, serve_worker
from tests.kvstore.admin.test_web_page import ARTIFACTS, CONTRAST, UNNAMED, rows_of, sign_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing"),
    pytest.mark.timeout(180),
]

OPTIONS = LocalAgentOptions(arena_bytes=16 << 20, window_memory_bytes=4 << 20)
TWO_AGENTS = "document.querySelectorAll('#agents tbody tr').length === 2"


@dataclass
class Served:
    """A cluster with two agents, and the port of the page."""

    cluster: LocalCluster
    port: int


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    with (
        LocalCluster.start(
            folder / "c",
            nodes=1,
            k=1,
            m=0,
            target_size_bytes=8 << 20,
            agents=2,
            agent_options=OPTIONS,
        ) as cluster,
        serve_worker(cluster.cluster_path) as api,
    ):
        yield Served(cluster, api.port)
    end_all(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def page(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Give a tab that shows the figures, and looks again ten times as often as it would."""
    with start_browser(tmp_path_factory.mktemp("profile")) as browser, browser.page() as page:
        page.size(1280, 900)
        page.prefer("light")
        page.hasten(10)
        sign_in(page, f"http://127.0.0.1:{served.port}/", TOKEN)
        page.wait_for(TWO_AGENTS)
        yield page


def test_agents_are_shown_and_one_that_is_down_is_named(page: Page, served: Served) -> None:
    page.wait_for("document.querySelectorAll('#agents .good').length === 2")
    assert page.text("#agents-note") == "2 of 2 agents alive"
    tile = "[...document.querySelectorAll('#tiles > div')].map((it) => it.innerText)[1]"
    assert page.evaluate(tile).split("\n") == ["Agents alive", "2 of 2", "all 2 entrypoints are up"]
    rows = rows_of(page, "agents")
    assert [row[:3] for row in rows] == [[name, "alive", "all"] for name in ("a01", "a02")]
    assert [row[3:9] for row in rows] == [["0.0 %", "16.0 MiB", "0", "0", "0", "0"]] * 2
    page.screenshot(ARTIFACTS / "page-agents.png")
    served.cluster.agents.kill("a02")
    try:
        page.wait_for("document.querySelector('#agents .bad')?.innerText.startsWith('down: ')")
        assert "1 entrypoint down: a02" in page.text("#agents-note")
        assert page.evaluate(tile).split("\n")[1:] == ["1 of 2", "1 entrypoint down: a02"]
        assert rows_of(page, "agents")[1][2:] == ["\u2013"] * 10
    finally:
        served.cluster.agents.start("a02")
    page.wait_for("document.querySelectorAll('#agents .good').length === 2")
    assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_agents_can_be_read_by_everybody(page: Page, scheme: str) -> None:
    page.prefer(scheme)
    page.wait_for(TWO_AGENTS)
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(UNNAMED) == []
    page.prefer("light")


def test_agents_fit_a_narrow_window(page: Page) -> None:
    page.size(360, 740)
    page.wait_for(TWO_AGENTS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.size(1280, 900)


@pytest.mark.parametrize("width", [1280, 1400])
def test_all_columns_of_agents_are_seen_in_a_window_of_usual_width(page: Page, width: int) -> None:
    page.size(width, 900)
    page.wait_for(TWO_AGENTS)
    # Large figures, as of a host that has been at work for months.
    busy = json.dumps(
        {
            "agent": "gpu-host-with-a-long-name-0123456",
            "entrypoint": None,
            "is_alive": True,
            "roles": ["check", "fetch", "window"],
            "arena_bytes": 987 << 20,
            "arena_used_bytes": 456 << 20,
            "runs": 12345,
            "sessions": 1024,
            "fetch_queued": 12345,
            "window_records": 123456,
            "window_hit_ratio": 0.987,
            "directory_share": 0.333,
            "uptime_s": 86400 * 123 + 3600 * 23,
        }
    )
    whole = "(() => { const it = document.getElementById('agents').parentElement;"
    whole += " return it.scrollWidth <= it.clientWidth; })()"
    shown = page.evaluate(
        "import('/static/agents.js').then((it) => {"
        f" it.showAgents({{agents: [{busy}]}}); return {whole}; }})"
    )
    page.wait_for(TWO_AGENTS)
    page.screenshot(ARTIFACTS / f"page-agents-{width}.png")
    assert shown is True
    assert page.evaluate(whole) is True
    page.size(1280, 900)


def test_cluster_without_agents_has_no_section_for_them(page: Page) -> None:
    page.wait_for("!document.getElementById('agents-section').hidden")
    hidden = "document.getElementById('agents-section').hidden"
    assert page.evaluate(
        f"import('/static/agents.js').then((it) => {{ it.showAgents({{}}); return {hidden}; }})"
    )


def test_text_from_an_agent_is_never_markup(page: Page) -> None:
    hostile = "<img src=x onerror=\"document.title='taken over'\">"
    agent = json.dumps(
        {"agent": hostile, "is_alive": True, "roles": [hostile], "address": hostile, "runs": 1}
    )
    shown = "document.querySelector('#agents tbody th').innerText"
    assert hostile == page.evaluate(
        "import('/static/agents.js').then((it) => {"
        f" it.showAgents({{agents: [{agent}]}}); return {shown}; }})"
    )
    assert page.evaluate("document.querySelectorAll('main img').length") == 0
    assert page.evaluate("document.title") == "Cachalot"
