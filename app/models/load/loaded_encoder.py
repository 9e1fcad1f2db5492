"""Load an embedding model: the encoder and the vocabulary of a file or folder.

The counterpart of `app.models.load.loaded_model` for models that generate no text. Importing it imports torch.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace

from gguf.constants import Keys

from app.errors import UnsupportedTokenizer
from app.generation.embedding_service import InputTokenizer
from app.models.load.kernel_preparation import (
    DEFAULT_OPTIONS,
    StoppableProgress,
    common_options,
    loading,
    lowered_context,
    prepare_kernels,
)
from app.models.stored_model import StoredModel, record_use
from app.progress import Progress
from app.settings.settings import Settings
from app.text import encoder_tokenizer, marked_tokenizer
from engine.checkpoints.checkpoint import Checkpoint
from engine.embedding import loading as embedders
from engine.embedding.encoder import Embedder
from engine.errors import UnsupportedModel
from engine.load_options import LoadOptions
from engine.loading import open_checkpoint
from quant.checkpoint_files import read_bytes

VOCABULARY = "tokenizer.json"


@dataclass(frozen=True)
class LoadedEncoder:
    """The encoder of one model, and the tokenizer of its inputs."""

    name: str
    encoder: Embedder
    tokenizer: InputTokenizer


def is_embedding_model(stored: StoredModel) -> bool:
    """Whether a model returns vectors instead of text.

    Raises ModelFileError, UnsupportedModel, or UnsupportedQuantization.
    """
    with open_checkpoint(stored.path) as checkpoint:
        return embedders.is_embedding_model(checkpoint)


def load_encoder_model(
    stored: StoredModel, settings: Settings, progress: Progress, base: LoadOptions = DEFAULT_OPTIONS
) -> LoadedEncoder:
    """Load a stored model for which `is_embedding_model` is true. `base` has the load options that are not settings.

    Raises ModelFileError, UnsupportedModel, UnsupportedTier, UnsupportedTokenizer, OSError, or LoadStopped.
    """
    options = common_options(settings, base)
    progress = StoppableProgress(progress, options.control)
    with open_checkpoint(stored.path, settings.quantize_method) as checkpoint:
        prepare_kernels(embedders.embedder_layouts(checkpoint, options), options, progress)
        tokenizer = _tokenizer(checkpoint)
        with loading(stored, progress) as reports:
            options = replace(options, report_kernels=reports.compiled)
            encoder = embedders.load_embedder(checkpoint, options, reports.read)
    with ExitStack() as loaded:
        loaded.callback(encoder.close)
        record_use(stored, settings.models_dir)
        if tokenizer.vocab_size > encoder.vocab_size:
            raise UnsupportedModel(
                f"{stored.path} has a vocabulary of {tokenizer.vocab_size} tokens, but its model has "
                f"{encoder.vocab_size}",
                "Try another copy of this model.",
            )
        # a chat model of the same files has one more token of context, so a setting of that length needs no warning
        if settings.context > encoder.context_length + 1:
            progress.say(lowered_context(settings, encoder.context_length))
        loaded.pop_all()
    return LoadedEncoder(stored.name, encoder, tokenizer)


def _tokenizer(checkpoint: Checkpoint) -> InputTokenizer:
    values = checkpoint.metadata.values
    if not checkpoint.metadata.is_config:
        is_bert = values.get(Keys.Tokenizer.MODEL) == "bert"
        return encoder_tokenizer.from_gguf(values) if is_bert else marked_tokenizer.from_gguf(values)
    vocabulary = read_bytes(checkpoint.path, VOCABULARY)
    if vocabulary is None:
        raise UnsupportedTokenizer(f"{checkpoint.path} has no {VOCABULARY}", "Pull the model again.")
    return encoder_tokenizer.from_json(vocabulary)
