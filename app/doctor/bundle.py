"""The archive of `ingle doctor --bundle`: redacted facts about this machine for a bug report, without chats."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from app.doctor.check_result import CheckResult
from app.doctor.installation import update_command
from app.doctor.redaction import SECRET, redactor
from app.errors import AppError
from app.models.store import ModelStore
from app.process.server_log import LogReader, log_path, previous_path
from app.service.manager import manager_of
from app.settings.settings import SECRETS, SETTINGS, Settings
from app.settings.values import plain
from app.whole_file import write_new_zip

LOG_LINES = 500
PACKAGES = (
    "inglenook", "torch", "numba", "numpy", "triton", "tokenizers", "textual", "uvicorn", "starlette", "httpx", "mcp"
)  # fmt: skip
_PRIVATE_NAMES = ("host", "host_names", "allowed_origins")  # settings that name machines of the user


@dataclass(frozen=True, slots=True)
class BundledFile:
    """A file of the archive."""

    name: str
    meaning: str
    content: bytes


def bundled_files(settings: Settings, results: Sequence[CheckResult]) -> list[BundledFile]:
    """Return the files of the archive, with everything redacted."""
    redact = redactor(settings)
    parts: Sequence[tuple[str, str, Callable[[], object]]] = (
        ("about.json", "versions, system, and hardware", _about),
        ("checks.json", "the results of ingle doctor", lambda: list(results)),
        ("settings.json", "the settings and where each comes from, without secrets", lambda: _settings(settings)),
        ("models.json", "names and sizes of the models", lambda: _models(settings)),
        ("service.json", "the state of the service", lambda: manager_of(settings).status()),
        ("log.json", f"the last {LOG_LINES} lines of the log of the servers", lambda: _log(settings)),
    )
    return [BundledFile(name, meaning, _encoded(redact(_or_problem(content)))) for name, meaning, content in parts]


def write_bundle(path: Path, files: Sequence[BundledFile]) -> None:
    """Write the archive to a new file that only this user can read. Raises AppError if the file exists, and OSError."""
    write_new_zip(path, ((file.name, file.content) for file in files))


def _or_problem(content: Callable[[], object]) -> object:
    """Return the content, or the error that prevents it: a bundle is needed most when something is broken."""
    try:
        return content()
    except (AppError, OSError) as problem:
        return {"problem": str(problem)}


def _encoded(content: object) -> bytes:
    return f"{json.dumps(content, indent=2)}\n".encode()


def _about() -> object:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "packages": dict(_versions()),
        "python": sys.version,
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": {"physical": psutil.cpu_count(logical=False), "logical": os.cpu_count()},
        "memory_bytes": psutil.virtual_memory().total,
        "update_command": update_command(),  # tells the way of installation
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _settings(settings: Settings) -> object:
    return [{"name": name, "value": _value(name, settings), "origin": settings.origins[name]} for name in SETTINGS]


def _value(name: str, settings: Settings) -> object:
    value = vars(settings)[name]
    is_hidden = name in SECRETS or (name in _PRIVATE_NAMES and settings.origins[name] != "default")
    return SECRET if is_hidden and value else plain(value)


def _models(settings: Settings) -> object:
    models = ModelStore(settings).entries()
    return [{"name": model.name, "size": model.size, "quantization": model.quantization} for model in models]


def _log(settings: Settings) -> object:
    path = log_path(settings.state_dir)
    with closing(LogReader(previous_path(path))) as previous, closing(LogReader(path)) as current:
        return [*previous.read(), *current.read()][-LOG_LINES:]
