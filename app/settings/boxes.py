"""The user's other machines whose models are used here, and the line with which such a machine is shared.

Each of them is a file in a private folder, because it contains the key.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from app.errors import InvalidSetting
from app.whole_file import write_whole
from engine.private_folder import private_folder

BOX_HEADER = "X-Ingle-Box"  # header with the name of the box by which its caller knows it
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_LINE = re.compile(
    r"https://(?P<key>[\w-]{16,256})@(?P<address>(?:[\w.-]+|\[[0-9a-f:.]+\]):[0-9]{1,5})/(?P<fingerprint>[0-9a-f]{64})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Box:
    """Another machine of the user. Requests name its models as `name/model`."""

    name: str
    url: str  # https, host, and port, without a path
    fingerprint: str  # SHA-256 of its certificate, in hexadecimal
    key: str = field(repr=False)

    @property
    def prefix(self) -> str:
        """The text before the name of each of its models."""
        return f"{self.name}/"

    @property
    def line(self) -> str:
        """The line that `ingle share` prints and `parse` reads. It needs no quotes in a shell."""
        return f"{self.url.replace('://', f'://{self.key}@')}/{self.fingerprint}"

    @classmethod
    def parse(cls, name: str, line: str) -> "Box":
        """Return the box with a name. Raises InvalidSetting, whose message never quotes the line, for it has a key."""
        if not _NAME.fullmatch(name):
            raise InvalidSetting(f"{name} is not a name for a machine", "Use lowercase letters, digits, and hyphens.")
        parts = _LINE.fullmatch(line.strip())
        if parts is None:
            raise InvalidSetting("this is not a line of ingle share", "Copy the whole line: it starts with https://.")
        return cls(name, f"https://{parts['address']}", parts["fingerprint"], parts["key"])


def read_boxes(state_dir: Path) -> dict[str, Box]:
    """Return all boxes by their names. Files of another version are left out."""
    files = sorted(boxes_folder(state_dir).glob("*.json"))
    found = (_read(file) for file in files if _NAME.fullmatch(file.stem))
    return {box.name: box for box in found if box is not None}


def find_box(model: str, state_dir: Path) -> Box | None:
    """Return the box whose model this is; None if it is a model of this machine."""
    name, slash, _ = model.partition("/")
    return _read(_file(state_dir, name)) if slash and _NAME.fullmatch(name) else None


def keep_box(box: Box, state_dir: Path) -> None:
    """Write a box to a file that only this user can read. Raises OSError."""
    private_folder(boxes_folder(state_dir))
    write_whole(_file(state_dir, box.name), json.dumps(asdict(box), indent=2).encode(), 0o600)


def forget_box(name: str, state_dir: Path) -> bool:
    """Remove a box. Returns whether there was one."""
    if not _NAME.fullmatch(name) or not (file := _file(state_dir, name)).exists():
        return False
    file.unlink()
    return True


def boxes_folder(state_dir: Path) -> Path:
    """Return the folder of the files. Its time of change is that of the last change of a box."""
    return state_dir / "boxes"


def _file(state_dir: Path, name: str) -> Path:
    return boxes_folder(state_dir) / f"{name}.json"


def _read(file: Path) -> Box | None:
    try:
        return Box(**json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
