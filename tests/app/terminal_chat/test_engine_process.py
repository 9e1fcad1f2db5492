"""The process of a chat's engine: nothing of it is left when it is stopped."""

import asyncio
import os
import subprocess
import sys
from contextlib import suppress

import pytest

from app.config import Settings
from app.terminal_chat.engine_child import Said
from app.terminal_chat.engine_process import EngineProcess


@pytest.mark.parametrize("is_heard", [True, False])
def test_one_that_is_stopped_leaves_neither_a_process_nor_a_pipe(settings: Settings, is_heard: bool) -> None:
    """Heard or not, since whoever started it may have been cancelled at any place."""
    talking = """import time; print('{"note": "one"}', flush=True); time.sleep(600)"""
    process = subprocess.Popen([sys.executable, "-S", "-c", talking], stdout=subprocess.PIPE)
    engine = EngineProcess(process, settings, "model")

    async def main() -> None:
        if is_heard:
            heard: asyncio.Queue[Said] = asyncio.Queue()
            serving = asyncio.create_task(engine.serving(heard.put_nowait))
            assert (await heard.get()).note == "one"
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
        await engine.stop()

    asyncio.run(main())
    assert process.stdout is not None
    assert process.stdout.closed
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
