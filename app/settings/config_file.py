"""Edit config.toml: write or remove one setting, and keep the rest of the file as it is, including comments.

app/settings/settings.py reads the file and defines the values of settings.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import InvalidSetting
from app.settings.settings import FORMER_NAMES, SECRETS, config_file, setting_named
from app.whole_file import write_whole
from engine.private_folder import private_folder

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

_PRIVATE = 0o600  # because the file can contain API keys


def write_setting(name: str, text: str) -> Path:
    """Set a setting to the value of `text`. Returns the path of the file.

    Raises InvalidSetting for an unknown name or an invalid value, and leaves the file unchanged.
    """
    setting = setting_named(name)
    former = FORMER_NAMES.get(name)
    try:
        value = former.parse(text) if former else setting.parse(text)
    except ValueError as problem:
        raise InvalidSetting(f"{name} {problem}", setting.meaning) from None
    document = _read()
    if former:
        document.pop(name, None)
    document[former.setting if former else name] = _as_toml(value, text)
    return _write(document)


def remove_setting(name: str) -> Path | None:
    """Remove a setting, or an unknown key, from the file. Returns the path of the file, or None if it had no such key.

    Raises InvalidSetting for a name that is neither a setting nor in the file.
    """
    document = _read()
    names = [name, *(former for former, old in FORMER_NAMES.items() if old.setting == name)]
    written = [one for one in names if one in document]
    if not written:
        setting_named(name)
        return None
    for one in written:
        del document[one]
    return _write(document)


def portable_settings() -> str:
    """Return the settings of the file as TOML, without comments, secrets, and addresses that contain a password."""
    import tomlkit

    kept = {name: value for name, value in _read().unwrap().items() if name not in _NOT_PORTABLE}
    return tomlkit.dumps({name: value for name, value in kept.items() if not _PASSWORD.search(str(value))})


def changed_settings(given: Mapping[str, object]) -> Mapping[str, object]:
    """Return those of the settings that differ from the file. Raises InvalidSetting for an invalid or secret one."""
    own = _read().unwrap()
    for name, value in given.items():
        former = FORMER_NAMES.get(name)
        setting = setting_named(name)
        if name in _NOT_PORTABLE:
            raise InvalidSetting(f"{name} is secret, and cannot be taken from a file", "Remove it from the archive.")
        try:
            (former.parse if former else setting.parse)(value)
        except ValueError as problem:
            raise InvalidSetting(f"{name} {problem}", setting.meaning) from None
    return {name: value for name, value in given.items() if own.get(name) != value}


def take_settings(given: Mapping[str, object]) -> Path:
    """Write settings that `changed_settings` returned into the file, all at once. Returns the path of the file."""
    document = _read()
    for name, value in given.items():
        document[name] = value
    return _write(document)


_NOT_PORTABLE = SECRETS | {"api_key_file"}
_PASSWORD = re.compile(r"://[^/\s]*@")


def _as_toml(value: object, text: str) -> object:
    """Convert the parsed value of a setting to TOML. A value of another type becomes the string `text`."""
    match value:
        case bool() | int() | float():
            return value
        case tuple():
            return list(value)
        case Mapping():
            return dict(value)
    return text


def _read() -> "TOMLDocument":
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    path = config_file()
    try:
        return tomlkit.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return tomlkit.document()
    except (OSError, UnicodeDecodeError, TOMLKitError) as problem:
        raise InvalidSetting(f"{path}: {problem}", "Correct the file, or remove it to use the defaults.") from None


def _write(document: "TOMLDocument") -> Path:
    """Replace the file. If it is a symbolic link, replace its target."""
    path = Path(os.path.realpath(config_file()))
    private_folder(path.parent)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else _PRIVATE
    write_whole(path, document.as_string().encode(), mode)
    return config_file()
