"""The server of `ingle run`: a running one, or an engine process that stays for later requests."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from types import MappingProxyType

from app.chat_backend.engine.child import ChildMessage
from app.chat_backend.engine.process import EngineProcess, absolute, find_or_start
from app.client.running_server import FoundServer, find_servers
from app.process.engine_lease import hold_lease
from app.process.instance import Instance
from app.progress import Progress, StageProgress
from app.settings.settings import Settings
from tui.plain_text import model_name

ANY_FREE_PORT = 0  # the port of the settings stays free for `ingle serve`


@asynccontextmanager
async def background_server(
    settings: Settings, progress: Progress, flags: Mapping[str, object] = MappingProxyType({})
) -> AsyncIterator[FoundServer]:
    """Find a server for the model of the settings, or start one. It stays while the body runs.

    `flags` are settings of a new server that differ from those of the user. A new server ends `keep_alive_s` seconds
    after its last request. If the start is cancelled, it ends at once. Raises EngineFailed and ModelNotFound.
    """
    async with AsyncExitStack() as resources:

        async def find() -> FoundServer | None:
            found = next(iter(await asyncio.to_thread(find_servers, settings)), None)
            if found is not None and found.instance.kind == "chat":
                resources.enter_context(hold_lease(settings, found.instance.pid))
            return found

        async def start() -> FoundServer:
            return await _start(settings, progress, flags, resources)

        with closing(StageProgress(progress)) as waiting:
            server = await find_or_start(
                settings,
                find,
                start,
                lambda model: waiting.show(f"Waiting until another program has loaded {model_name(model)}", 0, None),
            )
        yield server


async def _start(
    settings: Settings, progress: Progress, flags: Mapping[str, object], resources: AsyncExitStack
) -> FoundServer:
    from app.models.store import ModelStore

    # the engine process finds a wrong name as well, but only after its imports
    await asyncio.to_thread(lambda: ModelStore(settings).check_name(settings.model))
    process = EngineProcess.start(settings, absolute(settings.model), {**flags, "stay": False, "port": ANY_FREE_PORT})
    resources.enter_context(hold_lease(settings, process.pid))
    instance: Instance | None = None
    with closing(StageProgress(progress)) as stages:

        def on_message(message: ChildMessage) -> None:
            if instance is not None:  # later messages are the log of requests
                return
            if message.stage:
                stages.show(message.stage, message.done, message.total, message.unit)
            elif message.note:
                progress.say(message.note)

        try:
            instance = await process.wait_until_serving(on_message)
        except BaseException:
            await process.stop()
            raise
    return FoundServer(instance, instance.model)
