"""Tests for the engine process."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from typing import BinaryIO

import pytest

from app.chat_backend.engine.child import ChildMessage
from app.chat_backend.engine.process import LOG, PREVIOUS_LOG, EngineProcess
from app.errors import EngineFailed
from app.settings.settings import Settings


@pytest.mark.parametrize("is_heard", [True, False])
def test_stopped_engine_leaves_no_process_and_no_pipe(settings: Settings, is_heard: bool) -> None:
    """Runs with and without a reader of the messages, because the caller may be cancelled at any time."""
    talking = """import time; print('{"note": "one"}', flush=True); time.sleep(600)"""
    process = subprocess.Popen([sys.executable, "-S", "-c", talking], stdout=subprocess.PIPE)
    engine = EngineProcess(process, settings, "model")

    async def main() -> None:
        if is_heard:
            on_message: asyncio.Queue[ChildMessage] = asyncio.Queue()
            serving = asyncio.create_task(engine.wait_until_serving(on_message.put_nowait))
            assert (await on_message.get()).note == "one"
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
        await engine.stop()

    asyncio.run(main())
    assert process.stdout is not None
    assert process.stdout.closed
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_surviving_engine_does_not_delay_exit(settings: Settings) -> None:
    """The engine survives the chat with --stay, or while another client uses it."""
    talking = """import time; print('{"note": "one"}', flush=True); time.sleep(600)"""
    process = subprocess.Popen([sys.executable, "-S", "-c", talking], stdout=subprocess.PIPE)
    engine = EngineProcess(process, settings, "model")

    async def main() -> None:
        on_message: asyncio.Queue[ChildMessage] = asyncio.Queue()
        serving = asyncio.create_task(engine.wait_until_serving(on_message.put_nowait))
        await on_message.get()
        serving.cancel()

    asyncio.run(main())
    assert not engine.has_ended
    process.kill()
    with process:
        pass


def test_unknown_model_is_reported_without_earlier_messages(settings: Settings) -> None:
    messages: list[ChildMessage] = []

    async def main() -> None:
        engine = EngineProcess.start(settings, "nosuch:9b", {"stay": False})
        with pytest.raises(EngineFailed, match="no model is called nosuch:9b"):
            await engine.wait_until_serving(messages.append)
        await engine.stop()

    asyncio.run(main())
    assert [message for message in messages if not message.problem] == []


def test_previous_engine_log_is_kept(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(command: list[str], *, stderr: BinaryIO, **options: object) -> None:
        stderr.write(json.loads(command[-1])["model"].encode())

    monkeypatch.setattr(subprocess, "Popen", popen)
    for model in ("one", "two", "three"):
        EngineProcess.start(settings, model, {})
    assert [(settings.state_dir / name).read_text() for name in (LOG, PREVIOUS_LOG)] == ["three", "two"]
    assert stat.S_IMODE((settings.state_dir / LOG).stat().st_mode) == 0o600
