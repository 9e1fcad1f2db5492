"""A model ready to talk: the engine, the vocabulary and the chat template that one file holds.

This is where the application hands a model file to the engine; importing it loads torch.
"""

from dataclasses import dataclass

from app.catalog import Catalog
from app.config import Settings
from app.progress import Progress
from app.store import StoredModel
from app.tokenizer import Tokenizer
from engine.core import Engine
from engine.loading import LoadOptions, load_engine
from quant.gguf import GGUFFile


@dataclass(frozen=True)
class LoadedModel:
    """Everything a chat needs of one model."""

    name: str
    engine: Engine
    tokenizer: Tokenizer


def load_model(stored: StoredModel, settings: Settings, progress: Progress) -> LoadedModel:
    """Read the file of a stored model. Raises ModelFileError, UnsupportedModel or UnsupportedTokenizer."""
    options = LoadOptions(settings.kernels, settings.context, settings.threads)
    with GGUFFile(stored.path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        with progress.task(f"Loading {stored.name}", stored.size) as report:
            engine = load_engine(file, options, lambda done, _total: report(done))
    return LoadedModel(stored.name, engine, tokenizer)
