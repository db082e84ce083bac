"""Words of a command line that are no text."""

import pytest

from engine.errors import InvalidRequest
from engine.question import read_question


@pytest.mark.parametrize("option", ["prompt", "question", "system"])
def test_bytes_that_are_no_utf_8_are_refused_by_the_name_of_their_option(option: str) -> None:
    given = {"prompt": "x", "question": None, "system": None, option: "before \udcff behind"}
    with pytest.raises(InvalidRequest, match=rf"--{option}: given 'before \\udcff.*UTF-8 text"):
        read_question(**given, prompt_file=None, follow_up_of=None)
