"""The files of the web page, as they are delivered."""

from tests.architecture.source_tree import ROOT


def test_files_of_the_page_name_no_other_place() -> None:
    web = ROOT / "kvstore" / "admin" / "control" / "web"
    files = sorted(path.name for path in web.iterdir())
    assert files == [
        "agents.js",
        "app.js",
        "chart.js",
        "elements.js",
        "format.js",
        "icon.png",
        "index.html",
        "style.css",
        "view.js",
    ]
    for name in files:
        if not name.endswith(".png"):
            text = (web / name).read_text(encoding="utf-8")
            assert "//" not in text.replace("// ", "").replace("//\n", ""), name
            assert "innerHTML" not in text
            assert len(text.splitlines()) <= 500, name
