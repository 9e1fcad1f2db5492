"""Commands of ours in processes of their own: what needs torch, which the process of the screens is to be without."""

import asyncio
import sys

from app.config import child_environment
from app.terminal_chat.engine_process import ROOT


def with_memory(memory: int) -> tuple[str, ...]:
    """The option of a device that had so many bytes; none for 0, which is what it has."""
    return ("--memory", f"{memory / 1e9:.6f}GB") if memory else ()


async def said(*words: str) -> tuple[int | None, bytes, bytes]:
    """The exit status, stdout and stderr of `ingle` with these words. Cancelling ends it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app", *words,
        cwd=ROOT, env=child_environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.communicate()  # to the end of the pipes, which closes them
        raise
    return process.returncode, out, err


def reason(err: bytes, otherwise: str) -> str:
    """Why a command failed, in its own words."""
    lines = err.decode(errors="replace").splitlines()
    errors = (line[len("error: ") :] for line in lines if line.lower().startswith("error: "))
    return next(errors, otherwise)
