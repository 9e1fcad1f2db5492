"""Models that Ollama and LM Studio have stored, used without a copy."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

from app.errors import IntegrityError
from app.models import hub_cache
from app.models.digests import DIGESTS, digest_of, has_digest
from app.models.repository import COMPONENT, RepositoryName, choose, matching_models, models_among
from app.models.stored_model import StoredModel, stored_model
from app.progress import Progress
from app.settings.settings import Settings
from quant.bounded_json import JSONProblem, parse_object
from quant.errors import ModelFileError, printable

MAX_REPOSITORIES = 10_000


@dataclass(frozen=True, slots=True)
class LMStudioModels:
    """The models of LM Studio, by publisher and repository: "lmstudio:org/repo:Q4_K_M"."""

    folder: Path
    records: Path  # folder of recorded digests

    def find(self, name: str) -> StoredModel | None:
        wanted = RepositoryName.parse(name)
        folder = self.folder / wanted.repo if wanted else None
        if wanted is None or folder is None or not folder.is_dir():
            return None
        names = hub_cache.files(folder)
        if not matching_models(wanted, models_among(names)):
            return None
        model = choose(wanted, names)
        return self._stored(wanted.repo, model.quantization, folder / model.files[0] if model.is_gguf else folder)

    def entries(self) -> Iterator[StoredModel]:
        for folder in sorted(islice(self.folder.glob("*/*/"), MAX_REPOSITORIES)):
            repo = f"{folder.parent.name}/{folder.name}"
            if RepositoryName.parse(repo):
                for model in models_among(hub_cache.files(folder)):
                    path = folder / model.files[0] if model.is_gguf else folder
                    if model.is_whole and (stored := self._stored(repo, model.quantization, path)):
                        yield stored

    def verified(self, stored: StoredModel, progress: Progress) -> StoredModel:
        """Return the model with the digest that it has now. LM Studio records none to compare with."""
        return replace(stored, sha256=digest_of(stored.weights(), self.records, progress))

    def removal(self, name: str) -> str:
        return f"Remove {name} in LM Studio."

    def _stored(self, repo: str, quantization: str, path: Path) -> StoredModel | None:
        name = RepositoryName(repo, quantization or None)
        try:
            return stored_model(f"lmstudio:{name}", path, "LM Studio")
        except ModelFileError:
            return None


MAX_MANIFESTS = 10_000
_MAX_BYTES = 1 << 20  # limit of a manifest or a description
_WEIGHTS = "application/vnd.ollama.image.model"
_REGISTRY, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_NAME = re.compile(rf"(?:(?:({COMPONENT})/)?({COMPONENT})/)?({COMPONENT})(?::({COMPONENT}))?")
_BLOB = re.compile("sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class OllamaModels:
    """The models of Ollama, such as "ollama:llama3.2:1b"."""

    folder: Path
    records: Path  # folder of recorded digests

    def find(self, name: str) -> StoredModel | None:
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        registry, namespace, model, tag = found.groups()
        path = Path(registry or _REGISTRY, namespace or _NAMESPACE, model, tag or _TAG)
        return self._stored(self.folder / "manifests" / path)

    def entries(self) -> Iterator[StoredModel]:
        manifests = sorted(islice((self.folder / "manifests").glob("*/*/*/*"), MAX_MANIFESTS))
        return (stored for path in manifests if (stored := self._stored(path)))

    def verified(self, stored: StoredModel, progress: Progress) -> StoredModel:
        digest = stored.path.name.removeprefix("sha256-")
        if not has_digest(stored.path, digest, self.records, progress):
            raise IntegrityError(f"{stored.path} is damaged: it does not match the digest of {stored.name}")
        return replace(stored, sha256=digest)

    def removal(self, name: str) -> str:
        return f"ollama rm {name}"

    def _stored(self, manifest: Path) -> StoredModel | None:
        """Return the model of a manifest; None unless the manifest names one GGUF file, and that file exists."""
        layers = _json(manifest).get("layers")
        digests = [_digest(layer) for layer in layers if _digest(layer)] if isinstance(layers, list) else []
        path = self.folder / "blobs" / f"sha256-{digests[0]}" if len(digests) == 1 else None
        if path is None or not path.is_file():
            return None
        registry, namespace, model, tag = manifest.parts[-4:]
        if not all(re.fullmatch(COMPONENT, part) for part in (registry, namespace, model, tag)):
            return None
        parts = [registry, namespace, model]
        if registry == _REGISTRY:
            parts = parts[2:] if namespace == _NAMESPACE else parts[1:]
        name = f"ollama:{'/'.join(parts)}:{tag}"
        return StoredModel(name, path, path.stat().st_size, None, "Ollama", self._quantization(manifest), None)

    def _quantization(self, manifest: Path) -> str | None:
        """Return the quantization that the model's description states. The description is a small blob of JSON."""
        match _json(manifest).get("config"):
            case {"digest": str(digest)} if found := _BLOB.fullmatch(digest):
                value = _json(self.folder / "blobs" / f"sha256-{found[1]}").get("file_type")
                return printable(value) if isinstance(value, str) else None
        return None


def _digest(layer: object) -> str:
    """Return the sha256 of a layer that holds weights; empty for other layers."""
    match layer:
        case {"mediaType": str(kind), "digest": str(digest)} if kind == _WEIGHTS and (found := _BLOB.fullmatch(digest)):
            return found[1]
    return ""


def _json(path: Path) -> dict[str, object]:
    """Return the object in a small JSON file; empty if there is none."""
    try:
        if not path.is_file() or os.stat(path).st_size > _MAX_BYTES:
            return {}
        return parse_object(path.read_bytes())
    except (OSError, JSONProblem):
        return {}


class OtherTool(Protocol):
    """The models of another program."""

    def find(self, name: str) -> StoredModel | None:
        """Return the model with that name, without the prefix. Raises ModelNotFound if the name is ambiguous."""
        ...

    def entries(self) -> Iterator[StoredModel]: ...

    def verified(self, stored: StoredModel, progress: Progress) -> StoredModel:
        """Return the model with the digest of its bytes, after reading all of them.

        Raises IntegrityError or OSError.
        """
        ...

    def removal(self, name: str) -> str:
        """Return how the user removes the model with that program."""
        ...


def other_tools(settings: Settings) -> Mapping[str, OtherTool]:
    """Return the tools, each under the prefix of its models' names."""
    records = settings.models_dir / DIGESTS
    return {
        "ollama:": OllamaModels(settings.ollama_dir, records),
        "lmstudio:": LMStudioModels(settings.lmstudio_dir, records),
    }
