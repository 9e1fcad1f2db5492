"""The errors that users see, from the root to those of model files.

    InglenookError                     the problem, and what to do next
    ├── ModelFileError                 a model file that cannot be used
    │   ├── GGUFError                  malformed GGUF: names the field and the file offset
    │   ├── SafetensorsError           a malformed safetensors file, or files that do not fit together: names the field
    │   └── UnsupportedQuantization    a tensor type that this version cannot decode
    ├── UnsupportedTier                requested CPU kernels that this processor cannot execute
    ├── engine.errors.EngineError      (engine/errors.py)
    └── app.errors.AppError            (app/errors.py)

Programming errors are not in this tree: they remain built-in exceptions.
"""

from pathlib import Path

DAMAGED = "The file may be damaged or incomplete: remove it and pull it again."
UNREADABLE = "Check the disk and the permissions of the file, or pull the model again."


class InglenookError(Exception):
    """Base of every error shown to a user. `remedy` is one sentence that says what to do next, or empty."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class ModelFileError(InglenookError):
    """A model file cannot be used."""


class GGUFError(ModelFileError):
    """A GGUF file is malformed. `field` is the field that was read, `offset` bytes from the start of the file."""

    def __init__(self, path: Path, problem: str, *, field: str, offset: int, remedy: str = DAMAGED) -> None:
        super().__init__(f"{path} is not a usable GGUF file: {field} at byte {offset}: {problem}", remedy)
        self.path = path
        self.problem = problem
        self.field = field
        self.offset = offset


class SafetensorsError(ModelFileError):
    """A safetensors file, or the index of several, is malformed. `field` is the field that was read."""

    def __init__(self, path: Path, problem: str, *, field: str, remedy: str = DAMAGED) -> None:
        super().__init__(f"{path} is not a usable safetensors file: {field}: {problem}", remedy)
        self.path = path
        self.problem = problem
        self.field = field


class UnsupportedQuantization(ModelFileError):
    """A tensor is stored in a type that this version cannot decode."""


class UnsupportedTier(InglenookError):
    """The user requested CPU kernels that this processor cannot execute."""


def printable(name: str) -> str:
    """Return a name from a file for an error message: short, not empty, and without control characters."""
    short = name if len(name) <= 80 else name[:77] + "..."
    return short if short and short.isprintable() else ascii(short)
