"""Other programs whose stored models are used in place: a table.

Nothing of theirs is ever written or removed. Refuses to know how each of them keeps its files.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

from app.config import Settings
from app.models.digests import DIGESTS
from app.models.lm_studio_models import LMStudioModels
from app.models.ollama_models import OllamaModels
from app.models.stored_model import StoredModel
from app.progress import Progress


class OtherTool(Protocol):
    """The models of another program."""

    def find(self, name: str) -> StoredModel | None:
        """The model of that name, without the prefix. Raises ModelNotFound where it could be several."""
        ...

    def entries(self) -> Iterator[StoredModel]: ...

    def checked(self, stored: StoredModel, progress: Progress) -> StoredModel:
        """With the digest of its bytes, each of which has been read. Raises IntegrityError, OSError."""
        ...

    def removal(self, name: str) -> str:
        """How the program itself removes a model."""
        ...


def other_tools(settings: Settings) -> Mapping[str, OtherTool]:
    """Each by the prefix of its models' names."""
    records = settings.models_dir / DIGESTS
    return {
        "ollama:": OllamaModels(settings.ollama_dir, records),
        "lmstudio:": LMStudioModels(settings.lmstudio_dir, records),
    }
