"""Draft models: find and load the small model that drafts tokens for another one, for the setting `draft`."""

from contextlib import suppress
from dataclasses import replace
from itertools import count

from app.models.families import load_families
from app.models.load.kernel_preparation import loading, prepare_kernels
from app.models.repository import RepositoryName
from app.models.sources import pull
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.progress import Progress
from app.settings.settings import AUTO_DRAFT, Settings
from app.text.folder_tokenizer import from_folder
from app.text.gguf_tokenizer import from_gguf
from app.text.tokenizer import Tokenizer
from engine.backends.device_choice import layouts_to_compile
from engine.checkpoints.checkpoint import Checkpoint
from engine.errors import UnsupportedModel
from engine.fit import MemoryPlan, plan_memory
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, draft_options, load_draft_model, open_checkpoint
from quant.errors import InglenookError


def tokenizer_of(stored: StoredModel, checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a stored chat model. Raises UnsupportedTokenizer."""
    return from_folder(stored.path) if stored.is_folder else from_gguf(checkpoint.metadata.values)


def find_draft_model(
    target: StoredModel, tokenizer: Tokenizer, settings: Settings, progress: Progress
) -> StoredModel | None:
    """Return the model that drafts for `target`, downloaded if it is missing; None if there is none.

    Raises UnsupportedModel if its vocabulary differs, and the errors of `pull` and `open_checkpoint`.
    """
    name = _name_of_draft_model(target, settings)
    if name is None:
        if settings.draft_name == AUTO_DRAFT:
            progress.say(f"No small model is known that could draft for {target.title}.")
        return None
    stored = pull(name, settings, progress)
    with open_checkpoint(stored.path) as checkpoint:
        own = tokenizer_of(stored, checkpoint)
    for token_id, text, other in zip(count(), tokenizer.texts, own.texts, strict=False):
        if text != other and text and other:  # an empty text is an unused id
            raise UnsupportedModel(
                f"{stored.title} cannot draft for {target.title}: token {token_id:,} is {other!r} in its vocabulary, "
                f"not {text!r}",
                "Choose a smaller model of the same family, or leave out --draft.",
            )
    return stored


def planned_draft_model(target: StoredModel, settings: Settings, options: LoadOptions) -> int:
    """Return the bytes of memory that the draft model of `target` will take; 0 if there is none, or if it is not stored
    yet.
    """
    if name := _name_of_draft_model(target, settings):
        with suppress(InglenookError):  # a load reports it
            return draft_plan(ModelStore(settings).resolve(name), options).least
    return 0


def draft_plan(stored: StoredModel, options: LoadOptions) -> MemoryPlan:
    """Return the memory that a draft model takes beside a model that is loaded with these options.

    Raises the errors of `open_checkpoint`.
    """
    with open_checkpoint(stored.path) as checkpoint:
        return plan_memory(checkpoint, draft_options(options))


def _name_of_draft_model(target: StoredModel, settings: Settings) -> str | None:
    return known_draft_model(target.name) if settings.draft_name == AUTO_DRAFT else settings.draft_name


def known_draft_model(name: str) -> str | None:
    """Return the short name of a small model with the vocabulary of the model `name`; None if none is known."""
    asked = RepositoryName.parse(name)
    repository = asked.repo if asked else None
    return next((it.draft for it in load_families() if it.name == name or it.repository.repo == repository), None)


def add_draft_model(engine: ModelEngine, stored: StoredModel, options: LoadOptions, progress: Progress) -> None:
    """Load a draft model and let it draft for `engine`, whose load options are `options`.

    Raises the errors of `load_draft_model`.
    """
    with open_checkpoint(stored.path) as checkpoint:
        prepare_kernels(layouts_to_compile(checkpoint, options), options, progress)
        with loading(stored, progress) as reports:
            options = replace(options, report_kernels=reports.compiled)
            engine.draft_with(load_draft_model(checkpoint, options, engine, reports.read))
