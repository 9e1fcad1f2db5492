"""Copies text to the system clipboard with external programs, and reports whether it succeeded.

Without such a program, the application sends the terminal's escape sequence OSC 52 instead.
"""

import asyncio
import enum
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SECONDS = 2.0  # time limit of a clipboard program, because a display that does not answer must not delay the chat


class Destination(enum.Enum):
    """The destination of a copy, as a notification for the user."""

    CLIPBOARD = "Copied to the clipboard."
    TMUX = "Copied to tmux's buffer, and to the clipboard if the terminal allows it."
    TERMINAL = (
        "Copied with the escape sequence OSC 52. If you cannot paste it, allow OSC 52 in the terminal's settings."
    )


@dataclass(frozen=True, slots=True)
class CopyProgram:
    """A program that copies its standard input. Used if the environment has `variable`, or on the system `platform`."""

    command: tuple[str, ...]
    variable: str = ""
    platform: str = ""
    encoding: str = "utf-8"
    destination: Destination = Destination.CLIPBOARD

    def applies(self, environment: Mapping[str, str], platform: str) -> bool:
        return bool(self.variable and environment.get(self.variable)) or platform == self.platform


_TMUX = CopyProgram(("tmux", "load-buffer", "-w", "-"), "TMUX", destination=Destination.TMUX)
_DESKTOP = (
    CopyProgram(("pbcopy",), platform="darwin"),
    CopyProgram(("clip.exe",), "WSL_DISTRO_NAME", "win32", encoding="utf-16"),
    CopyProgram(("wl-copy",), "WAYLAND_DISPLAY"),
    CopyProgram(("xclip", "-selection", "clipboard"), "DISPLAY"),
    CopyProgram(("xsel", "--clipboard", "--input"), "DISPLAY"),
)
_REMOTE = ("SSH_CONNECTION", "SSH_TTY")  # in a remote session, the desktop's clipboard belongs to the other machine


def pick_programs(
    environment: Mapping[str, str], platform: str, is_installed: Callable[[str], bool]
) -> Sequence[CopyProgram]:
    """Return the programs to run: tmux if the chat runs in it, and one for the desktop unless the session is remote."""
    usable = [one for one in (_TMUX, *_DESKTOP) if one.applies(environment, platform) and is_installed(one.command[0])]
    is_remote = any(environment.get(name) for name in _REMOTE)
    desktop = [one for one in usable if one is not _TMUX and not is_remote]
    return [one for one in usable if one is _TMUX] + desktop[:1]


class Clipboard:
    """Copies texts with external programs. `environment` selects the programs, and is passed on to them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        path = environment.get("PATH", "")
        self.programs = pick_programs(environment, sys.platform, lambda name: bool(shutil.which(name, path=path)))

    async def copy(self, text: str) -> Destination | None:
        """Copy text, and return where it was copied to, or None if no program accepted it."""
        copied = [one.destination for one in self.programs if await self._run(one, text)]
        return copied[-1] if copied else None

    async def _run(self, program: CopyProgram, text: str) -> bool:
        """Return whether the program accepted the text in time. Its output is not read, because xclip keeps it open."""
        return await asyncio.to_thread(self._accepts, program, text.encode(program.encoding, "replace"))

    def _accepts(self, program: CopyProgram, content: bytes) -> bool:
        command = shutil.which(program.command[0], path=self._environment.get("PATH", "")) or program.command[0]
        nowhere = subprocess.DEVNULL
        try:
            done = subprocess.run(
                [command, *program.command[1:]],
                input=content,
                stdout=nowhere,
                stderr=nowhere,
                env=dict(self._environment),
                timeout=SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):  # a program that hangs is killed
            return False
        return done.returncode == 0
