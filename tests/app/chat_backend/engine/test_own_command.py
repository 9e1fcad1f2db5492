"""Tests for running `ingle` commands in child processes."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from app.chat_backend.engine import process
from app.chat_backend.engine.process import error_message, memory_option, run_ingle
from app.errors import EXIT_OK, EXIT_USAGE


def test_run_ingle_returns_output_and_errors() -> None:
    status, out, _ = asyncio.run(run_ingle("ls", "--catalog", "--json"))
    assert status == EXIT_OK
    assert json.loads(out)
    status, out, err = asyncio.run(run_ingle("fit", "--memory", "much"))
    assert (status, out) == (EXIT_USAGE, b"")
    assert "must be a size like 8GB, not 'much'" in error_message(err, "nobody knows")
    assert error_message(b"Killed\n", "nobody knows") == "nobody knows"


def test_cancelling_kills_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "pid"
    (tmp_path / "app.py").write_text(
        f"import os, time, pathlib\npathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(process, "ROOT", tmp_path)

    async def main() -> None:
        command = asyncio.create_task(run_ingle("anything"))
        while not (mark.exists() and mark.read_text()):
            await asyncio.sleep(0.01)
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)

    asyncio.run(main())


def test_memory_option_has_the_bytes_in_gb() -> None:
    assert memory_option(0) == ()
    assert memory_option(18_500_000_000) == ("--memory", "18.500000GB")
