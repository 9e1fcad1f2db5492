"""config.toml as a file that people edit: one setting is written or removed, and all else stays as it is, comments too.

Refuses to know what settings mean: app/settings/settings.py says which values they can have, and reads the file.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import InvalidSetting
from app.settings.settings import FORMER_NAMES, config_file, setting_named
from app.whole_file import write_whole
from engine.private_folder import private_folder

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

_PRIVATE = 0o600  # the file can hold keys


def write_setting(name: str, text: str) -> Path:
    """Have the file say that a setting is what `text` stands for. Returns its path.

    Raises InvalidSetting, with what is allowed, for a name or a value that makes no sense; the file is as before then.
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
    """Have the file say nothing of a setting, or of what is none. Returns its path; None where it said nothing."""
    document = _read()
    names = [name, *(former for former, old in FORMER_NAMES.items() if old.setting == name)]
    written = [one for one in names if one in document]
    if not written:
        setting_named(name)
        return None
    for one in written:
        del document[one]
    return _write(document)


def _as_toml(value: object, text: str) -> object:
    """As people would write it: a number and a truth value as such, a list as a list; all else as the text it was."""
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
    """In place of the file; where it is a link, of what it leads to."""
    path = Path(os.path.realpath(config_file()))
    private_folder(path.parent)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else _PRIVATE
    write_whole(path, document.as_string().encode(), mode)
    return config_file()
