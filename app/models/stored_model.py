"""A model on this machine (a GGUF file, the parts of one, or a safetensors folder), and the time of its last load.

Reads names and sizes only.
"""

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from app.models.repository import CONFIG, DESCRIPTIONS, quantization_of
from engine.private_folder import private_folder
from quant.checkpoint_files import read_object
from quant.errors import ModelFileError, printable
from quant.gguf_parts import part_paths
from quant.safetensors_shards import weight_files

_PART = re.compile(r"-\d{5}-of-\d{5}$")  # number of a part of a split file
LOCAL_FILE, LOCAL_FOLDER = LOCAL = ("local file", "local folder")


@dataclass(frozen=True)
class StoredModel:
    """A model on this machine."""

    name: str  # name in the catalog or of a repository, or the path as the user gave it
    path: Path  # a GGUF file, the first part of one, or a folder
    size: int  # bytes
    sha256: str | None  # None: not computed yet, or the model has several files
    source: str  # origin of the model, for display
    quantization: str | None  # None: unknown without opening the file
    stored_at: str | None  # time of the first verification, ISO 8601 in UTC

    @property
    def title(self) -> str:
        """The name for display. For a path, its last part."""
        return self.path.name if self.source in LOCAL else self.name

    @property
    def served_name(self) -> str:
        """The name in requests. For a path, its last part without the suffix."""
        if self.source not in LOCAL:
            return self.name
        path = Path(os.path.abspath(self.path))
        return path.name if self.is_folder else _PART.sub("", path.stem)

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    def weights(self) -> list[Path]:
        """Return the files that determine what the model computes. Raises ModelFileError if one is missing."""
        return [*weight_files(self.path), self.path / CONFIG] if self.is_folder else part_paths(self.path)


@dataclass(frozen=True)
class Removal:
    """The result of removing one file."""

    path: Path
    freed: int  # bytes
    shared: bool  # whether it was in the Hugging Face cache, which other tools may have used


def is_model(path: Path) -> bool:
    """Whether a path looks like a model, judged by file names only."""
    if path.is_dir():
        return (path / CONFIG).is_file() and any(file.suffix == ".safetensors" for file in path.iterdir())
    return path.is_file() and path.suffix.lower() == ".gguf"


def stored_model(name: str, path: Path, source: str, stored_at: str | None = None) -> StoredModel:
    """Return the model at a path for which `is_model` is true.

    Raises ModelFileError if files are missing or damaged.
    """
    if path.is_dir():
        described = [path / file for file in DESCRIPTIONS if (path / file).is_file()]
        files, quantization = [*weight_files(path), *described], _quantization(path)
    else:
        files = part_paths(path)
        path, quantization = files[0], quantization_of(path.name) or None
    size = sum(os.stat(file).st_size for file in files)
    return StoredModel(name, path, size, None, source, quantization, stored_at)


def _quantization(folder: Path) -> str | None:
    """Return the quantization or dtype in a folder's config.json. Errors in that file are reported when the model
    loads.
    """
    try:
        config = read_object(folder, CONFIG)
    except ModelFileError:
        return None
    match config:
        case {"quantization_config": {"quant_method": str(method)}}:
            return printable(method)
        case {"torch_dtype": str(dtype)} | {"dtype": str(dtype)}:
            return printable(dtype)
    return None


_FOLDER = ".used"


def record_use(stored: StoredModel, models_dir: Path) -> None:
    """Record that the model is used now."""
    with suppress(OSError):  # a read-only folder must not prevent loading
        private_folder(models_dir / _FOLDER)
        _stamp(stored, models_dir).touch()


def last_use(stored: StoredModel, models_dir: Path) -> str | None:
    """Return the time of the last load, ISO 8601 in UTC; None if the model was never loaded."""
    try:
        seconds = _stamp(stored, models_dir).stat().st_mtime
    except OSError:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _stamp(stored: StoredModel, models_dir: Path) -> Path:
    """Return the path of the time stamp. Its file name is a digest of the model's path, which can be too long."""
    return models_dir / _FOLDER / hashlib.sha256(os.fsencode(stored.path.absolute())).hexdigest()[:32]
