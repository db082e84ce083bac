"""The web page in a real browser, over the control API of real workers beside real nodes.

Pictures of what was seen are left in build/test-artifacts.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from kvstore.admin.control_options import default_token_path
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_workers import bind_control_ports
from kvstore.client import BlockingStoreClient
from kvstore.layout import BLOCK_TOKENS
from tests.architecture.source_tree import ROOT
from tests.kvstore.admin.browser import CHROMIUM, Browser, Page, start_browser
from tests.kvstore.admin.control_host import TOKEN, ControlApi, request, serve_worker
from tests.kvstore.blocks import RandomBlocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing"),
    pytest.mark.timeout(180),
]

ARTIFACTS = ROOT / "build" / "test-artifacts"
NODES = 3
STORED, ABSENT = 60, 20
START_DEADLINE_S = 60.0
SAMPLED_WITHIN_S = 15.0

# Contrast of every text with the nearest ground that is not transparent, by the formula of WCAG 2.
CONTRAST = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const part = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) =>
    0.2126 * part(r / 255) + 0.7152 * part(g / 255) + 0.0722 * part(b / 255);
  const ground = (element) => {
    for (let here = element; here; here = here.parentElement) {
      const colour = parse(getComputedStyle(here).backgroundColor);
      if (colour[3] !== 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const texts = [...element.childNodes].filter((n) => n.nodeType === 3 && n.data.trim());
    if (!texts.length || !element.checkVisibility() || element.closest("noscript")) continue;
    const style = getComputedStyle(element);
    const isInChart = element.namespaceURI !== document.documentElement.namespaceURI;
    const [a, b] = [light(parse(isInChart ? style.fill : style.color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${texts[0].data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return found;
})()"""

# Fields without a name, tables and charts that do not say what they are, headings out of order.
UNNAMED = """(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const label = (one) => one.getAttribute("aria-label");
  const name = (one) => one.labels?.[0]?.innerText || label(one) || one.innerText;
  const level = (one) => Number(one.tagName[1]);
  const headings = all("h1, h2, h3");
  const ids = all("[id]").map(({ id }) => id);
  return [
    ...all("button, input").filter((one) => !name(one)),
    ...all("table").filter((one) => !one.caption?.textContent.trim()),
    ...all("thead th").filter((one) => !one.scope),
    ...all("svg, [role=meter]").filter((one) => one.checkVisibility() && !label(one)),
    ...headings.filter((one, index) => index && level(one) > level(headings[index - 1]) + 1),
  ].map((one) => one.outerHTML.slice(0, 80)).concat(
    ids.filter((id, index) => ids.indexOf(id) !== index));
})()"""


@dataclass
class Served:
    """A cluster with workers, and where the page of one of them is."""

    cluster: LocalCluster
    token: str
    stored: RandomBlocks
    absent: RandomBlocks

    def address(self, node: str = "n01") -> str:
        control = self.cluster.map.node_by_name[node].control
        assert control is not None
        return control

    def url(self, node: str = "n01") -> str:
        return f"http://{self.address(node)}/"

    def ask(self, path: str, *, method: str = "GET", body: object = None) -> dict[str, Any]:
        port = int(self.address().rpartition(":")[2])
        reply = request(port, method, path, body, self.token)
        assert reply.status == 200, reply
        return reply.json

    def start_workers(self) -> None:
        """Start those that are missing, on their old addresses."""
        missing = self.cluster.workers.missing(self.cluster.map)
        self.cluster.workers.start(missing, bind_control_ports(missing))


def wait_until(
    what: str, is_so: Callable[[], object], *, deadline_s: float = START_DEADLINE_S
) -> None:
    due_s = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < due_s, what
        time.sleep(0.1)


def count_hits(served: Served) -> float:
    """Hit tokens in the history of the last hour."""
    history = served.ask("/api/history")
    place = history["columns"].index("hit_tokens")
    return float(sum(row[place] for row in history["tiers"][0]["rows"]))


def has_hits(served: Served) -> bool:
    """Whether a sample has seen hits.

    What a client tells at its end is lost if the node is too busy to take it in half a second: it
    is done again then.
    """
    due_s = time.monotonic() + SAMPLED_WITHIN_S
    while count_hits(served) == 0 and time.monotonic() < due_s:
        time.sleep(0.1)
    if count_hits(served) > 0:
        return True
    fetch_and_miss(served)
    return False


def has_counted(served: Served) -> bool:
    """Whether the workers together have counted every block as whole."""
    by_shards: dict[str, int] = served.ask("/api/workers")["redundancy"]["by_shards"]
    return by_shards[str(NODES)] >= STORED


def fetch_and_miss(served: Served) -> None:
    """Fetch all blocks, and ask for others that are not there."""
    blocks, absent = served.stored, served.absent
    client = BlockingStoreClient(served.cluster.cluster_path)
    target = blocks.empty_target()
    assert client.fetch(blocks.namespace, blocks.keys, target.blocks).blocks == STORED
    assert client.match(absent.namespace, absent.keys) == 0
    client.close()


def count_missed(served: Served) -> int:
    """Tokens that clients found not stored, as all nodes say together."""
    nodes = served.ask("/api/nodes")["nodes"]
    return sum(
        figures["miss_tokens"]["not_stored"]
        for node in nodes
        for figures in node["statistics"]["namespaces"].values()
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give a cluster with workers that has stored, given and missed blocks."""
    folder = tmp_path_factory.mktemp("page") / "c"
    blocks = RandomBlocks(STORED, block_bytes=20_000, seed=1)
    absent = RandomBlocks(ABSENT, block_bytes=20_000, seed=2)
    with LocalCluster.start(
        folder, nodes=NODES, k=2, m=1, target_size_bytes=8 << 20, gc=True
    ) as up:
        token = default_token_path(up.cluster_path).read_text().strip()
        served = Served(up, token, blocks, absent)
        client = BlockingStoreClient(up.cluster_path)
        saved = client.save(blocks.namespace, blocks.keys, blocks.sources, ttl_class="agent")
        assert saved.stored == STORED
        client.close()
        # Begins anew with blocks to look at, instead of looking again in a minute.
        up.workers.kill("n01")
        served.start_workers()
        wait_until("a first sample", lambda: served.ask("/api/history")["tiers"][0]["rows"])
        fetch_and_miss(served)
        yield served


@pytest.fixture(scope="module")
def used(served: Served) -> None:
    """Wait until the worker has seen what clients told and has counted shards.

    It takes a sample every ten seconds, so the tests that need none come before.
    """
    wait_until("hits in the history", partial(has_hits, served))
    wait_until("all blocks in the count", partial(has_counted, served))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Give a new tab without memory of others."""
    with browser.page() as found:
        found.size(1280, 900)
        found.prefer("light")
        # It looks again every 5 s, and later and later while nobody answers.
        found.hasten(10)
        yield found


@pytest.fixture(scope="module")
def scripted(served: Served) -> Iterator[ControlApi]:
    """Give an API over the same nodes whose worker says what a test puts there."""
    with serve_worker(served.cluster.cluster_path) as api:
        yield api


def sign_in(page: Page, url: str, token: str) -> None:
    page.open(url)
    page.wait_for("!document.getElementById('sign-in').hidden")
    page.fill("#token", token)
    page.click("#sign-in-form button")


def open_figures(page: Page, served: Served, node: str = "n01") -> None:
    sign_in(page, served.url(node), served.token)
    page.wait_for("document.querySelectorAll('#nodes tbody tr').length > 0")


def rows_of(page: Page, table: str) -> list[list[str]]:
    """Give the texts of a table's cells."""
    rows: list[list[str]] = page.evaluate(
        f"[...document.querySelectorAll('#{table} tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"
    )
    return rows


def tile(page: Page, name: str) -> list[str]:
    """Give value and note of one of the tiles at the top."""
    tiles: dict[str, list[str]] = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#tiles div')].map((one) =>"
        " [one.querySelector('dt').innerText,"
        " [...one.querySelectorAll('dd')].map((dd) => dd.innerText)]))"
    )
    return tiles[name]


def test_page_asks_nobody_but_its_worker(page: Page, served: Served) -> None:
    open_figures(page, served)
    assert page.urls
    assert [url for url in page.urls if not url.startswith(served.url())] == []


def test_nothing_is_shown_without_a_token(page: Page, served: Served) -> None:
    page.open(served.url())
    page.wait_for("!document.getElementById('sign-in').hidden")
    assert page.evaluate("document.activeElement.id") == "token"
    assert page.evaluate("document.getElementById('figures').hidden")
    assert [url for url in page.urls if "/api/" in url] == []
    assert page.complaints == []


def test_wrong_token_is_said_and_asked_for_again(page: Page, served: Served) -> None:
    sign_in(page, served.url(), "not-the-token")
    page.wait_for("document.getElementById('alert').innerText.includes('refused')")
    assert not page.evaluate("document.getElementById('sign-in').hidden")
    assert page.evaluate("sessionStorage.length") == 0
    page.screenshot(ARTIFACTS / "page-wrong-token.png")
    page.fill("#token", served.token)
    page.command("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r")
    page.wait_for("document.querySelectorAll('#nodes tbody tr').length > 0")
    assert page.evaluate("document.getElementById('alert').hidden")


def test_token_stays_in_its_tab_until_it_is_forgotten(page: Page, served: Served) -> None:
    open_figures(page, served)
    page.open(served.url())
    page.wait_for("document.querySelectorAll('#nodes tbody tr').length > 0")
    kept = "JSON.stringify(localStorage) + document.cookie + location.href"
    assert served.token not in page.evaluate(kept)
    page.click("#forget")
    assert page.evaluate("sessionStorage.length") == 0
    assert "n01" not in page.text()
    assert not page.evaluate("document.getElementById('sign-in').hidden")


def test_redundancy_is_shown_by_number_of_shards(page: Page, scripted: ControlApi) -> None:
    scripted.worker.reset()
    scripted.worker.reports["redundancy"] = {
        "k": 2,
        "width": 3,
        "blocks_by_shards": [0, 1, 20, 300],
        "started_at_s": 1_700_000_000,
        "duration_s": 3.0,
        "backlog": 4,
    }
    # The sum of all workers is asked for at most every two seconds.
    time.sleep(2.1)
    sign_in(page, f"http://127.0.0.1:{scripted.port}/", TOKEN)
    page.wait_for("document.querySelectorAll('#redundancy .level').length > 0")
    assert "counted by 1 of 3 nodes, as of up to" in page.text("#redundancy-note")
    assert page.text("#events-title") == "What the worker of n01 did"
    shown = page.text("#redundancy").split("\n")
    texts = ["3 shards (all)", "2 shards (readable)", "1 shard (unreadable)"]
    assert [line for line in shown if "shard" in line] == texts
    assert [line for line in shown if line.isdecimal()] == ["300", "20", "1"]
    assert "waiting for repair: 4" in page.text("#redundancy-note")
    assert tile(page, "Blocks with all shards")[0] == "93.5 %"
    assert rows_of(page, "events")[0][1:] == ["evicted", "shards 3"]


def test_text_from_a_node_is_never_markup(page: Page, scripted: ControlApi) -> None:
    hostile = "<img src=x onerror=\"document.title='taken over'\"><b>bold</b>"
    scripted.worker.reset()
    scripted.worker.reports["ages"] = {
        "at_s": 5,
        "bounds_s": [600],
        "by_class": {hostile: [1, 2]},
    }
    sign_in(page, f"http://127.0.0.1:{scripted.port}/", TOKEN)
    page.wait_for("document.querySelectorAll('#ages tbody tr').length > 0")
    assert rows_of(page, "ages")[0][0] == hostile
    assert page.evaluate("document.querySelectorAll('main img, main b').length") == 0
    assert page.evaluate("document.title") == "Cachalot"


def test_part_that_fails_is_named_and_the_rest_is_shown(page: Page, scripted: ControlApi) -> None:
    scripted.worker.reset()
    scripted.worker.reports["redundancy"] = {"k": object()}  # JSON has nothing for it
    sign_in(page, f"http://127.0.0.1:{scripted.port}/", TOKEN)
    page.wait_for("document.getElementById('alert').innerText.includes('/api/status')")
    assert "Some figures are missing" in page.text("#alert")
    assert [row[0] for row in rows_of(page, "nodes")] == ["n01", "n02", "n03"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_can_be_read_by_everybody(page: Page, served: Served, scheme: str) -> None:
    page.prefer(scheme)
    page.open(served.url())
    page.wait_for("!document.getElementById('sign-in').hidden")
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(UNNAMED) == []
    open_figures(page, served)
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(UNNAMED) == []


def test_page_fits_a_narrow_window(page: Page, served: Served) -> None:
    page.size(360, 740)
    open_figures(page, served)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.screenshot(ARTIFACTS / "page-narrow.png")


def test_theme_is_what_the_system_prefers_until_one_is_chosen(page: Page, served: Served) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page.open(served.url())
    light = page.evaluate(ground)
    page.prefer("dark")
    dark = page.evaluate(ground)
    assert light != dark
    page.click("#theme")
    assert page.evaluate(ground) == light
    assert page.text("#theme") == "Theme: light"
    page.open(served.url())
    assert page.evaluate(ground) == light
    page.click("#theme")
    page.prefer("light")
    assert page.evaluate(ground) == dark


@pytest.mark.usefixtures("used")
def test_page_shows_what_the_worker_knows(page: Page, served: Served) -> None:
    open_figures(page, served)
    assert tile(page, "Nodes alive") == [f"{NODES} of {NODES}", "1 more may fail"]
    hit, missed = STORED, ABSENT
    assert tile(page, "Hit rate")[0] == f"{hit / (hit + missed) * 100:.1f} %"
    assert tile(page, "Policy")[0] == "version 0"
    nodes = rows_of(page, "nodes")
    assert [row[0] for row in nodes] == ["n01", "n02", "n03"]
    assert {row[1] for row in nodes} == {"alive"}
    assert all(row[9].endswith("ago") for row in nodes), "how old each node's count is"
    held = "(box => box.scrollHeight <= box.clientHeight)(document.querySelector('.scroll.whole'))"
    assert page.evaluate(held), "all nodes at once"
    assert page.evaluate("document.querySelectorAll('#fill-chart circle').length") >= 1
    assert {row[6] for row in nodes} == {str(STORED)}
    usage = served.ask("/api/status")["worker"]["usage"]["n01-t0"]["fraction"]
    assert nodes[0][3] == f"{usage * 100:.1f} %"
    value, note = tile(page, "Blocks with all shards")
    assert value == "100.0 %"
    assert note.startswith(f"of {STORED}, counted by all {NODES} nodes, as of up to")
    assert ["agent", str(STORED)] in [row[:2] for row in rows_of(page, "ages")]
    assert ["agent", "3 d", f"{NODES * STORED}"] in [row[:3] for row in rows_of(page, "policy")]
    misses = page.text("#misses")
    assert count_missed(served) >= ABSENT * BLOCK_TOKENS
    assert f"tokens: not stored\n{count_missed(served):,}" in misses
    assert "keys: never stored" in misses
    for name in ("light", "dark"):
        page.prefer(name)
        page.screenshot(ARTIFACTS / f"page-{name}.png")
        assert (ARTIFACTS / f"page-{name}.png").stat().st_size > 20_000
    assert page.complaints == []


@pytest.mark.usefixtures("used")
def test_chart_has_the_points_of_the_history(page: Page, served: Served) -> None:
    open_figures(page, served)
    marks = "document.querySelectorAll('#hit-chart path, #hit-chart circle').length"
    assert page.evaluate(marks) >= 1
    label = page.evaluate("document.getElementById('hit-chart').getAttribute('aria-label')")
    assert label == "Hit rate over the last 1 h: 75.0 %"
    page.click("#windows button:last-child")
    label = page.evaluate("document.getElementById('hit-chart').getAttribute('aria-label')")
    assert label == "Hit rate over the last 1 d: 75.0 %"
    assert page.text("#windows [aria-pressed=true]") == "24 h"
    page.click("summary")
    shares = {row[1] for row in rows_of(page, "history-table")}
    assert "75.0 %" in shares
    assert page.complaints == []


def test_page_says_when_its_worker_is_gone_and_goes_on_when_it_is_back(
    page: Page, served: Served
) -> None:
    open_figures(page, served, "n02")
    served.cluster.workers.kill("n02")
    page.wait_for("document.getElementById('alert').innerText.includes('does not answer')")
    assert page.text("#connection") == "Not connected"
    assert "What is shown is of" in page.text("#alert")
    # The last figures stay, and are marked as old.
    assert page.evaluate("document.getElementById('figures').classList.contains('stale')")
    assert len(rows_of(page, "nodes")) == NODES
    page.screenshot(ARTIFACTS / "page-worker-down.png")
    served.start_workers()
    page.wait_for("document.getElementById('alert').hidden", deadline_s=60.0)
    assert page.text("#connection").startswith("As of")


def test_page_says_which_node_is_down_and_what_that_means(page: Page, served: Served) -> None:
    served.cluster.kill("n03")
    try:
        open_figures(page, served)
        page.wait_for("document.querySelector('#nodes tbody tr:last-child .bad')")
        assert rows_of(page, "nodes")[2][1].startswith("down: ")
        assert tile(page, "Nodes alive") == [f"{NODES - 1} of {NODES}", "no further one may fail"]
    finally:
        served.cluster.restart_node("n03")
    page.wait_for("!document.querySelector('#nodes tbody .bad')", deadline_s=30.0)


def test_page_shows_what_was_evicted_and_who_changed_the_policy(page: Page, served: Served) -> None:
    # The last one: it takes away what the others look at. No other worker may be quicker.
    for node in ("n02", "n03"):
        served.cluster.workers.kill(node)
    open_figures(page, served)
    served.ask(
        "/api/policy",
        method="PUT",
        body={
            "change": {"kind": "watermarks", "high": 0.05, "low": 0.03},
            "who": "operator",
            "why": "to see what goes",
        },
    )
    served.ask("/api/gc/run", method="POST", body={})
    page.wait_for("document.getElementById('events').innerText.includes('evicted')")
    evicted = [row for row in rows_of(page, "events") if row[1] == "evicted"]
    assert "target n01-t0" in evicted[0][2]
    assert "decided by capacity" in evicted[0][2]
    page.wait_for("document.getElementById('policy-note').innerText.includes('operator')")
    assert "Version 1. Watermarks: 3.0 % and 5.0 %." in page.text("#policy-note")
    assert "watermarks (to see what goes)" in page.text("#policy-note")
    page.wait_for("document.getElementById('tiles').innerText.includes('version 1')")
    assert int(rows_of(page, "nodes")[0][6]) < STORED
    page.screenshot(ARTIFACTS / "page-evicted.png")
    assert page.complaints == []
