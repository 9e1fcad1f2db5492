"""API keys of the server: those that the user set, and generated ones for the commands of the same user and for the
user's other machines.
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

_KEY_BYTES = 32
_KEY_FILE = "Give a text file with one API key per line."


def chosen_keys(settings: Settings) -> tuple[str, ...]:
    """Return the keys of the settings, without duplicates. Raises InvalidSetting, whose message never shows a key."""
    if settings.api_key and settings.origins.get("api_key") == str(config_file()):
        _check_private(config_file())
    of_file = () if settings.api_key_file is None else _read_keys(settings.api_key_file)
    return tuple(dict.fromkeys((*settings.api_key, *of_file)))


def own_key(settings: Settings) -> str | None:
    """Return the generated key that commands of this user send, or None if no server has generated one yet."""
    return _generated(own_key_file(settings))


def make_own_key(settings: Settings) -> str:
    """Return the key that `own_key` returns, and generate it if there is none. Raises OSError."""
    return _make_generated(own_key_file(settings))


def own_key_file(settings: Settings) -> Path:
    """Return the path of the file with the generated key."""
    return settings.state_dir / "own-key"


def shared_key(settings: Settings) -> str | None:
    """Return the key that `ingle share` generated for other machines, or None if this machine is not shared."""
    return _generated(_shared_key_file(settings))


def make_shared_key(settings: Settings) -> str:
    """Return the key that `shared_key` returns, and generate it if there is none. Raises OSError."""
    return _make_generated(_shared_key_file(settings))


def revoke_shared_key(settings: Settings) -> bool:
    """Delete the key of `shared_key`, which running servers then refuse. Returns whether there was one."""
    file = _shared_key_file(settings)
    existed = file.exists()
    file.unlink(missing_ok=True)
    return existed


def _shared_key_file(settings: Settings) -> Path:
    return settings.state_dir / "share" / "key"


def _generated(file: Path) -> str | None:
    try:
        return _read_keys(file)[0]
    except InvalidSetting:
        return None


def _make_generated(file: Path) -> str:
    """Return the key in a file that only this user can read. If there is none, generate it."""
    if (key := _generated(file)) is not None:
        return key
    key = secrets.token_urlsafe(_KEY_BYTES)
    private_folder(file.parent)
    write_whole(file, f"{key}\n".encode("ascii"), 0o600)
    return key


def _read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one per line. Lines that start with # are comments."""
    try:
        _check_private(path)
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        keys = key_list([line for line in lines if line and not line.startswith("#")])
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "the file is not UTF-8 text"
        raise InvalidSetting(f"{path}: {reason}", _KEY_FILE) from None
    except ValueError as problem:
        raise InvalidSetting(f"{path}: a key {problem}", _KEY_FILE) from None
    if not keys:
        raise InvalidSetting(f"{path}: the file contains no key", _KEY_FILE)
    return keys


def _check_private(path: Path) -> None:
    """Raise InvalidSetting if other users can read or write the file, or another user owns it."""
    if sys.platform == "win32":  # file modes have no meaning there
        return
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise InvalidSetting(f"{path}: this is not a regular file", _KEY_FILE)
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o077:
        raise InvalidSetting(f"{path}: other users can access this file of API keys", f"chmod 600 {path}")
