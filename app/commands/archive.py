"""The archive of `ingle export` and `ingle import`: chats, settings without keys, and the names of the models.

An archive is a zip file. It may come from anyone, so everything in it is checked before anything is changed.
"""

import tomllib
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from app.errors import AppError
from app.history.chat_file import ChatFile, FileChat, as_json
from app.history.history import History
from app.history.records import Preset
from app.settings.config_file import portable_settings
from app.whole_file import write_new_zip

FORMAT, VERSION = "inglenook-archive", 1
_ABOUT, _CHATS, _PRESETS, _SETTINGS, _MODELS = (
    "about.json",
    "chats.json",
    "presets.json",
    "settings.toml",
    "models.json",
)
_LIMITS: Mapping[str, int] = {  # bytes of each file of an archive
    _ABOUT: 1 << 16, _CHATS: 1 << 30, _PRESETS: 16 << 20, _SETTINGS: 1 << 20, _MODELS: 1 << 20
}  # fmt: skip
_MOST_RATIO, _FREE_BYTES = 200, 1 << 24  # text is not compressed more than this; smaller files may be
_OTHER = "Give an archive that ingle export has written."

KindT = TypeVar("KindT")


class BadArchive(AppError):
    """The file is no archive of this program, is damaged, or is unsafe to read."""


class About(Struct):
    """The description of an archive."""

    format: str
    version: int


class StoredName(Struct):
    """The name of a model, and the size of its files in bytes."""

    name: str
    size: int = 0


@dataclass(frozen=True, slots=True)
class Archive:
    """The contents of an archive, all of them checked."""

    chats: Sequence[FileChat]
    presets: Sequence[Preset]
    settings: Mapping[str, Any]
    models: Sequence[StoredName]


def is_archive(path: Path) -> bool:
    """Whether the file is a zip file. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return zipfile.is_zipfile(file)


def write_archive(path: Path, history: History, models: Sequence[StoredName]) -> int:
    """Write a new archive that only this user can read. Returns the number of chats.

    Raises AppError if the file exists, and OSError.
    """
    chats = history.with_messages()
    contents = {
        _ABOUT: msgspec.json.encode(About(FORMAT, VERSION)),
        _CHATS: as_json(chats),
        _PRESETS: msgspec.json.encode(history.inputs.presets()),
        _SETTINGS: portable_settings().encode(),
        _MODELS: msgspec.json.encode(models),
    }
    write_new_zip(path, contents.items())
    return len(chats)


def read_archive(path: Path) -> Archive:
    """Read and check an archive. Raises BadArchive or OSError."""
    try:
        with zipfile.ZipFile(path) as archive:
            contents = {name: _member(archive, name) for name in _checked_names(archive)}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as problem:
        raise BadArchive(f"{path} is damaged ({problem})", _OTHER) from problem
    about = _decoded(contents, _ABOUT, About)
    if about.format != FORMAT:
        raise BadArchive(f"{path} is no archive of Inglenook", _OTHER)
    if about.version != VERSION:
        raise BadArchive(
            f"{path} has version {about.version} of the archive, and this program reads {VERSION}", "ingle update"
        )
    return Archive(
        _decoded(contents, _CHATS, ChatFile).chats,
        _decoded(contents, _PRESETS, list[Preset]),
        _toml(contents),
        _decoded(contents, _MODELS, list[StoredName]),
    )


def _checked_names(archive: zipfile.ZipFile) -> Sequence[str]:
    """Return the names of the files. Raises BadArchive for other files than those of an archive, and for bombs."""
    found = archive.infolist()
    if sorted(one.filename for one in found) != sorted(_LIMITS):
        raise BadArchive(f"{archive.filename} is no archive of Inglenook: it contains other files", _OTHER)
    for one in found:
        is_bomb = one.file_size > _FREE_BYTES and one.file_size > _MOST_RATIO * one.compress_size
        if one.file_size > _LIMITS[one.filename] or is_bomb:
            raise BadArchive(
                f"{archive.filename}: {one.filename} has {one.file_size:,} bytes, which is more than it may", _OTHER
            )
    return [one.filename for one in found]


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    with archive.open(name) as file:  # reads at most the size that the archive states, which is checked
        return file.read()


def _decoded(contents: Mapping[str, bytes], name: str, kind: type[KindT]) -> KindT:
    try:
        return msgspec.json.decode(contents[name], type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as problem:
        raise BadArchive(f"{name} of the archive cannot be read ({problem})", _OTHER) from problem


def _toml(contents: Mapping[str, bytes]) -> Mapping[str, Any]:
    try:
        return tomllib.loads(contents[_SETTINGS].decode())
    except (tomllib.TOMLDecodeError, UnicodeError, RecursionError) as problem:
        raise BadArchive(f"{_SETTINGS} of the archive cannot be read ({problem})", _OTHER) from problem
