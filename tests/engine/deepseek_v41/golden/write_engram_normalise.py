"""Writes engram_normalise.json: a part of the golden strings of Engram's compressed vocabulary, for
where the folder is not. Those that fall together with another are kept, and a few others; ids are
numbered anew, as they are first seen.

Run: python tests/engine/deepseek_v41/golden/write_engram_normalise.py GOLDEN_FOLDER
"""

import json
import sys
from collections import Counter
from pathlib import Path

ALONE = 5


def main(folder: Path) -> None:
    golden = json.loads((folder / "units" / "engram_normalise.json").read_text(encoding="utf-8"))
    strings, ids = golden["strings"], golden["compressed_ids"]
    shared = Counter(ids)
    places = [place for place, number in enumerate(ids) if shared[number] > 1]
    places += [place for place, number in enumerate(ids) if shared[number] == 1][:ALONE]
    places += [place for place, text in enumerate(strings) if "\ufffd" in text]
    numbers: dict[int, int] = {}
    content = {
        "strings": [strings[place] for place in places],
        "spellings": [f"r{place}" for place in places],
        "compressed_ids": [numbers.setdefault(ids[place], len(numbers)) for place in places],
    }
    text = json.dumps(content, ensure_ascii=True, indent=1).replace(",\n  ", ", ")
    (Path(__file__).parent / "engram_normalise.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
