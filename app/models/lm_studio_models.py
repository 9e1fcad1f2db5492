"""The models that LM Studio has stored for itself, by publisher and repository: read in place, never written."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from app.models import hub_cache
from app.models.digests import digest_of
from app.models.repository import RepositoryName, choose, meant, models_among
from app.models.stored_model import StoredModel, stored_model
from app.progress import Progress
from quant.errors import ModelFileError

MAX_REPOSITORIES = 10_000


@dataclass(frozen=True, slots=True)
class LMStudioModels:
    """The models of LM Studio, by publisher and repository: "lmstudio:org/repo:Q4_K_M"."""

    folder: Path
    records: Path  # of digests

    def find(self, name: str) -> StoredModel | None:
        wanted = RepositoryName.parse(name)
        folder = self.folder / wanted.repo if wanted else None
        if wanted is None or folder is None or not folder.is_dir():
            return None
        names = hub_cache.files(folder)
        if not meant(wanted, models_among(names)):
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

    def checked(self, stored: StoredModel, progress: Progress) -> StoredModel:
        """Nobody says which bytes they should be: they are known by their digest from now on."""
        return replace(stored, sha256=digest_of(stored.weights(), self.records, progress))

    def removal(self, name: str) -> str:
        return f"Remove {name} in LM Studio."

    def _stored(self, repo: str, quantization: str, path: Path) -> StoredModel | None:
        name = RepositoryName(repo, quantization or None)
        try:
            return stored_model(f"lmstudio:{name}", path, "LM Studio")
        except ModelFileError:
            return None
