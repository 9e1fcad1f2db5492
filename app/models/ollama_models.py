"""The models that Ollama has stored for itself: read in place, never written.

It keeps manifests, each of which names the sha256 of a GGUF file among its blobs. They are read as anything from the
network is: bounded, and no name leads out of the folder.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from app.errors import IntegrityError
from app.models.digests import holds
from app.models.repository import COMPONENT
from app.models.stored_model import StoredModel
from app.progress import Progress
from quant.bounded_json import JSONProblem, parse_object
from quant.errors import printable

MAX_MANIFESTS = 10_000
_MAX_BYTES = 1 << 20  # of a manifest, or of a description
_WEIGHTS = "application/vnd.ollama.image.model"
_REGISTRY, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_NAME = re.compile(rf"(?:(?:({COMPONENT})/)?({COMPONENT})/)?({COMPONENT})(?::({COMPONENT}))?")
_BLOB = re.compile("sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class OllamaModels:
    """The models of Ollama: "ollama:llama3.2:1b"."""

    folder: Path
    records: Path  # of digests

    def find(self, name: str) -> StoredModel | None:
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        registry, namespace, model, tag = found.groups()
        place = Path(registry or _REGISTRY, namespace or _NAMESPACE, model, tag or _TAG)
        return self._stored(self.folder / "manifests" / place)

    def entries(self) -> Iterator[StoredModel]:
        manifests = sorted(islice((self.folder / "manifests").glob("*/*/*/*"), MAX_MANIFESTS))
        return (stored for path in manifests if (stored := self._stored(path)))

    def checked(self, stored: StoredModel, progress: Progress) -> StoredModel:
        digest = stored.path.name.removeprefix("sha256-")
        if not holds(stored.path, digest, self.records, progress):
            raise IntegrityError(f"{stored.path} is damaged: its bytes are not those of {stored.name}")
        return replace(stored, sha256=digest)

    def removal(self, name: str) -> str:
        return f"ollama rm {name}"

    def _stored(self, manifest: Path) -> StoredModel | None:
        """None for what is no manifest of one GGUF file that is there."""
        layers = _json(manifest).get("layers")
        digests = [_digest(layer) for layer in layers if _digest(layer)] if isinstance(layers, list) else []
        path = self.folder / "blobs" / f"sha256-{digests[0]}" if len(digests) == 1 else None
        if path is None or not path.is_file():
            return None
        registry, namespace, model, tag = manifest.parts[-4:]
        if not all(re.fullmatch(COMPONENT, part) for part in (registry, namespace, model, tag)):
            return None
        place = [registry, namespace, model]
        if registry == _REGISTRY:
            place = place[2:] if namespace == _NAMESPACE else place[1:]
        name = f"ollama:{'/'.join(place)}:{tag}"
        return StoredModel(name, path, path.stat().st_size, None, "Ollama", self._quantization(manifest), None)

    def _quantization(self, manifest: Path) -> str | None:
        """As the model's own description has it, a small blob."""
        match _json(manifest).get("config"):
            case {"digest": str(digest)} if found := _BLOB.fullmatch(digest):
                value = _json(self.folder / "blobs" / f"sha256-{found[1]}").get("file_type")
                return printable(value) if isinstance(value, str) else None
        return None


def _digest(layer: object) -> str:
    """The sha256 of a layer that is weights; empty for any other."""
    match layer:
        case {"mediaType": str(kind), "digest": str(digest)} if kind == _WEIGHTS and (found := _BLOB.fullmatch(digest)):
            return found[1]
    return ""


def _json(path: Path) -> dict[str, object]:
    """The object that a small file holds; empty where it holds none."""
    try:
        if not path.is_file() or os.stat(path).st_size > _MAX_BYTES:
            return {}
        return parse_object(path.read_bytes())
    except (OSError, JSONProblem):
        return {}
