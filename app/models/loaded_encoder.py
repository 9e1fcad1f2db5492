"""A model ready to give embeddings: the encoder and the vocabulary that one file or folder holds.

The counterpart of `app.models.loaded_model` for models that write no text; importing it loads torch.
"""

from dataclasses import dataclass

from app.apart import run_apart
from app.config import Settings
from app.embedding_service import InputTokenizer
from app.errors import UnsupportedTokenizer
from app.models.stored_model import StoredModel
from app.progress import Progress
from app.text import encoder_tokenizer, marked_tokenizer
from engine import encoder_loading
from engine.checkpoint import Checkpoint
from engine.encoder import Embedder
from engine.errors import UnsupportedModel
from engine.loading import LoadOptions, compile_layouts, layouts_are_compiled, open_checkpoint
from quant.checkpoint_files import read_bytes

VOCABULARY = "tokenizer.json"


@dataclass(frozen=True)
class LoadedEncoder:
    """Everything that embeddings need of one model."""

    name: str
    encoder: Embedder
    tokenizer: InputTokenizer


def gives_embeddings(stored: StoredModel) -> bool:
    """Whether a model answers with vectors, and not with text. Raises ModelFileError, UnsupportedModel or
    UnsupportedQuantization."""
    with open_checkpoint(stored.path) as checkpoint:
        return encoder_loading.gives_embeddings(checkpoint)


def load_encoder_model(stored: StoredModel, settings: Settings, progress: Progress) -> LoadedEncoder:
    """Read the files of a stored model for which `gives_embeddings` holds.

    Raises ModelFileError, UnsupportedModel, UnsupportedTier, UnsupportedTokenizer, or OSError.
    """
    options = LoadOptions(
        backend=settings.kernels,
        context_length=settings.context,
        threads=settings.threads,
        activation_planes=settings.activation_planes,
        cpu_tier=settings.cpu_tier,
        device=settings.device,
        gpu_memory=settings.gpu_memory,
        deterministic=settings.deterministic,
        code_cache=settings.cache_dir,
    )
    with open_checkpoint(stored.path, None if settings.quantize == "none" else settings.quantize) as checkpoint:
        layouts = encoder_loading.embedder_layouts(checkpoint, options)
        if not layouts_are_compiled(layouts, options):
            with progress.task("Preparing the CPU engine, once on this machine", None):
                run_apart(lambda: compile_layouts(layouts, options))
        tokenizer = _tokenizer(checkpoint)
        with progress.task(f"Loading {stored.name}", stored.size) as report:
            encoder = encoder_loading.load_embedder(checkpoint, options, lambda done, _total: report(done))
    if tokenizer.vocab_size > encoder.vocab_size:
        raise UnsupportedModel(
            f"{stored.path} names {tokenizer.vocab_size} tokens, and its model knows {encoder.vocab_size}",
            "Try another copy of this model.",
        )
    return LoadedEncoder(stored.name, encoder, tokenizer)


def _tokenizer(checkpoint: Checkpoint) -> InputTokenizer:
    values = checkpoint.metadata.values
    if not checkpoint.metadata.is_config:
        is_bert = values.get(encoder_tokenizer.MODEL) == "bert"
        return encoder_tokenizer.from_gguf(values) if is_bert else marked_tokenizer.from_gguf(values)
    vocabulary = read_bytes(checkpoint.path, VOCABULARY)
    if vocabulary is None:
        raise UnsupportedTokenizer(f"{checkpoint.path} has no {VOCABULARY}", "Pull the model again.")
    return encoder_tokenizer.from_json(vocabulary)
