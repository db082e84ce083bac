"""Whether engine workers serve a model of the kind that a path names: asked before it is read for
its tokenizer, which takes seconds. Whether it is the same model their client finds out, with that.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from .client import ClientDeadlines, EnginePlaces
from .client.answer import WorkerLost
from .client.conversation import ask_status
from .errors import InvalidRequest
from .layout import FOLDER_MODEL, namespace_model
from .model_identity import ModelIdentity, read_identity, source_of
from .worker.address import WorkerAddress

ANSWER_S = 1.0
"""For the question alone: a worker that is silent is waited for later."""


def check_model_kind(model: Path | None, places: EnginePlaces, deadlines: ClientDeadlines) -> None:
    """Raises InvalidRequest if the first worker that says what it serves has a folder and `model`
    is a file, or the other way round. None is the GGUF file of the wheel."""
    found = asyncio.run(_ask(places, deadlines))
    if found is None:
        return
    place, served = found
    is_folder = model is not None and model.is_dir()
    if is_folder == (served.name == namespace_model(FOLDER_MODEL)):
        return
    given = "the GGUF file of the wheel, without --model" if model is None else source_of(model)
    raise InvalidRequest(
        "model",
        given=f"{given}{', a folder' if is_folder else ''}",
        expected=f"{served.describe()}, which the engine at {place} serves",
    )


async def _ask(
    places: EnginePlaces, deadlines: ClientDeadlines
) -> tuple[WorkerAddress, ModelIdentity] | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            for place in places.for_prompts + places.decode:
                try:
                    status = await ask_status(place, deadlines)
                except WorkerLost:
                    continue
                served = read_identity(status.get("model"))
                return None if served is None else (place, served)
    except TimeoutError:
        pass
    return None
