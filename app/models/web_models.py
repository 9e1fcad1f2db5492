"""Models from any web address: GGUF files whose sha256 is part of their name.

Each is stored in a folder named by its digest, in the models folder, with a record of its address.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from app.errors import AppError, IntegrityError, ModelNotFound
from app.models.digests import DIGESTS, has_digest, remember_sha256
from app.models.repository import COMPONENT, quantization_of
from app.models.stored_model import Removal, StoredModel
from app.models.transfer.incoming import Incoming, arrived, check_space, receive
from app.progress import Progress
from app.whole_file import write_whole
from engine.private_folder import private_folder

_NAME = re.compile(r"(?P<address>https?://[^\s#]+?)(?:#sha256=(?P<digest>[0-9a-fA-F]{64}))?")
_FOLDER, _RECORD = "web", "from.json"


@dataclass(frozen=True, slots=True)
class WebName:
    """`https://.../file.gguf#sha256=...`: the address of a file, and its digest."""

    address: str
    sha256: str
    file: str  # file name

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a name. Returns None if the text is no address. Raises AppError if the address is incomplete."""
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        file = unquote(urlsplit(found["address"]).path).rpartition("/")[2]
        if not re.fullmatch(rf"{COMPONENT}\.gguf", file, re.IGNORECASE):
            raise AppError(f"{text} does not end in the name of a GGUF file", "Give the address of the file itself.")
        if "@" in urlsplit(found["address"]).netloc:
            raise AppError(
                "the address contains a user name or a password, which model lists would show", "Remove them."
            )
        if not found["digest"]:
            remedy = f"Add its digest: {found['address']}#sha256=... (64 digits; sha256sum prints them)."
            raise AppError(f"{text} has no digest", remedy)
        return cls(found["address"], found["digest"].lower(), file)

    def __str__(self) -> str:
        return f"{self.address}#sha256={self.sha256}"


class WebModels:
    """The stored models from the web."""

    def __init__(self, models_dir: Path) -> None:
        self._folder = models_dir / _FOLDER
        self._records = models_dir / DIGESTS

    def find(self, name: WebName) -> StoredModel | None:
        """Return the file with that digest, even if it was downloaded from another address."""
        folder = self._folder_of(name.sha256)
        return self._stored(folder) if folder.is_dir() else None

    def entries(self) -> Iterator[StoredModel]:
        for folder in sorted(self._folder.glob("*/")):
            if stored := self._stored(folder):
                yield stored

    def verify(self, stored: StoredModel, name: WebName, progress: Progress) -> None:
        """Raise IntegrityError if the file does not match its digest. The file is read only once."""
        if not has_digest(stored.path, name.sha256, self._records, progress):
            raise IntegrityError(f"{stored.path} is damaged: it does not match the digest of {stored.name}")

    @contextmanager
    def receiving(self, name: WebName, size: int) -> Iterator[Incoming]:
        """Store a file of `size` bytes as the body writes it: verified and complete, or not at all.

        The caller must hold the download turn.
        """
        final = self._folder_of(name.sha256) / name.file
        check_space(final.parent, size - arrived(final))
        private_folder(final.parent)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"address": name.address, "file": name.file, "stored_at": now}
        write_whole(final.parent / _RECORD, json.dumps(record, indent=2).encode())
        with receive(final, size, name.sha256, resumable=True) as incoming:
            yield incoming
        remember_sha256(final, self._records, name.sha256)

    def remove(self, name: WebName, *, really: bool = True) -> Removal:
        """Remove the model. Without `really`, only report the space that this would free. Raises ModelNotFound."""
        folder = self._folder_of(name.sha256)
        if not folder.is_dir():
            raise ModelNotFound(f"{name} is not on this machine", "ingle ls lists the stored models.")
        final = folder / name.file
        freed = arrived(final) + (final.stat().st_size if final.is_file() else 0)
        if really:
            shutil.rmtree(folder)
        return Removal(final, freed, shared=False)

    def _folder_of(self, digest: str) -> Path:
        return self._folder / digest

    def _stored(self, folder: Path) -> StoredModel | None:
        """Return the stored model, or None if its file is not complete."""
        try:
            record = json.loads((folder / _RECORD).read_bytes())
            address, file, stored_at = str(record["address"]), str(record["file"]), str(record["stored_at"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        path = folder / Path(file).name
        if not path.is_file():
            return None
        quantization = quantization_of(file) or None
        name = f"{address}#sha256={folder.name}"
        return StoredModel(name, path, path.stat().st_size, None, "web", quantization, stored_at)
