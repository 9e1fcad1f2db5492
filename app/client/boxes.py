"""Models of boxes, the user's other machines."""

import asyncio
from collections.abc import Iterable

from app.client.http import ServerSilent
from app.client.own_server import Client, ServerModel
from app.process.instance import BoxInstance
from app.settings.boxes import Box
from quant.errors import InglenookError

LIST_SECONDS = 1.5  # time limit of a box for the list of its models


async def models_of(box: Box) -> list[ServerModel]:
    """Return the models of a box, with the names by which requests to this machine name them.

    Raises ServerUnreachable or ServerError.
    """
    async with Client(BoxInstance.of(box)) as client:
        return [model for model in await client.models() if model.name.startswith(box.prefix)]


async def models_of_all(boxes: Iterable[Box]) -> dict[str, list[ServerModel] | InglenookError]:
    """Return the models of each box by its name, or the reason why it does not answer in LIST_SECONDS."""

    async def ask(box: Box) -> list[ServerModel] | InglenookError:
        try:
            async with asyncio.timeout(LIST_SECONDS):
                return await models_of(box)
        except TimeoutError:
            return ServerSilent(f"{box.name} does not respond: no answer in {LIST_SECONDS:g} s")
        except InglenookError as problem:
            return problem

    listed = list(boxes)
    answers = await asyncio.gather(*map(ask, listed))
    return {box.name: answer for box, answer in zip(listed, answers, strict=True)}
