"""The keys that let a program in: those that the user chose, and one of our own for the commands of this user.

Knows files and settings. Refuses to know how a key travels and who asks for one.
"""

import os
import secrets
import stat
import sys
from pathlib import Path

from app.errors import InvalidSetting
from app.settings.settings import Settings, config_file
from app.settings.values import key_list
from app.whole_file import write_whole
from engine.private_folder import private_folder

_OWN_KEY_BYTES = 32


def chosen_keys(settings: Settings) -> tuple[str, ...]:
    """The keys of the settings, without repetition. Raises InvalidSetting, which never shows one."""
    if settings.api_key and settings.origins.get("api_key") == str(config_file()):
        _check_private(config_file())
    of_file = () if settings.api_key_file is None else _read_keys(settings.api_key_file)
    return tuple(dict.fromkeys((*settings.api_key, *of_file)))


def own_key(settings: Settings) -> str | None:
    """The key that commands of this user carry; None where no server has made one yet."""
    try:
        return _read_keys(own_key_file(settings))[0]
    except InvalidSetting:
        return None


def make_own_key(settings: Settings) -> str:
    """The same, made where there is none: in a file that this user alone can read. Raises OSError."""
    if (key := own_key(settings)) is not None:
        return key
    key, file = secrets.token_urlsafe(_OWN_KEY_BYTES), own_key_file(settings)
    private_folder(file.parent)
    write_whole(file, f"{key}\n".encode("ascii"), 0o600)
    return key


def own_key_file(settings: Settings) -> Path:
    """Where that is."""
    return settings.state_dir / "own-key"


def _read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; lines that begin with # are remarks."""
    try:
        _check_private(path)
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        keys = key_list([line for line in lines if line and not line.startswith("#")])
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise InvalidSetting(f"{path}: {reason}", "Name a file with one API key a line.") from None
    except ValueError as problem:
        raise InvalidSetting(f"{path}: a key {problem}", "Name a file with one API key a line.") from None
    if not keys:
        raise InvalidSetting(f"{path}: there is no key in it", "Name a file with one API key a line.")
    return keys


def _check_private(path: Path) -> None:
    """Raises InvalidSetting for a file that others can read or write, or that is somebody else's."""
    if sys.platform == "win32":  # where modes say nothing
        return
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise InvalidSetting(f"{path}: it is no file", "Name a file with one API key a line.")
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o077:
        raise InvalidSetting(f"{path}: it holds API keys, and is open to other users", f"chmod 600 {path}")
