"""Load a chat model: the engine, the vocabulary, and the chat template from its files.

This is where the application passes a stored model to the engine. Importing this module imports torch.
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace

from app.models.catalog import Sampling, load_catalog
from app.models.digests import DIGESTS, digest_of
from app.models.fit import compare_with_plan, plan_loading
from app.models.load.draft_models import add_draft_model, draft_plan, find_draft_model, tokenizer_of
from app.models.load.kernel_preparation import (
    DEFAULT_OPTIONS,
    StoppableProgress,
    chat_options,
    loading,
    lowered_context,
    prepare_kernels,
)
from app.models.sampling_defaults import DEFAULT_SAMPLING, catalogued_sampling, read_sampling
from app.models.stored_model import StoredModel, record_use
from app.progress import Progress
from app.settings.settings import Settings
from app.text.tokenizer import Tokenizer
from engine.backends.device_choice import layouts_to_compile
from engine.config import EngineConfig
from engine.device import Needs
from engine.errors import OutOfMemory, UnsupportedModel
from engine.kv.parked_cache import ParkedCache
from engine.load_options import DiskOptions, LoadOptions
from engine.loading import ModelEngine, compile_gpu_kernels, load_engine, open_checkpoint
from engine.models import read_config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatModel:
    """A chat model that is ready to use."""

    name: str
    engine: ModelEngine
    tokenizer: Tokenizer
    sampling: Sampling  # recommended by the catalog or the files, or the default
    weight_bytes: int  # size of the loaded weights that compute one token; 0: unknown
    needs: Needs  # memory of weights and steps, and all of the draft model's


def load_model(
    stored: StoredModel,
    settings: Settings,
    progress: Progress,
    base: LoadOptions = DEFAULT_OPTIONS,
    parked: ParkedCache | None = None,
) -> ChatModel:
    """Load a stored model. `base` has the load options that are not settings, such as limits of memory. `parked` is the
    KV cache of an earlier load.

    Raises OutOfMemory if it does not fit, before its weights are read; ModelFileError, UnsupportedModel,
    UnsupportedTier, UnsupportedTokenizer, or OSError if it cannot be read. A draft model can cause the same errors, and
    those of `pull`. Raises LoadStopped if `base.control` stops the load.
    """
    options = chat_options(settings, base)
    progress = StoppableProgress(progress, options.control)
    with open_checkpoint(stored.path, settings.quantize_method) as checkpoint:
        read_config(checkpoint.metadata)  # raises for a model that cannot chat, before its vocabulary is read
        plan = plan_loading(checkpoint, options, stored, settings, progress)
        values = checkpoint.metadata.values
        tokenizer = tokenizer_of(stored, checkpoint)
        options.control.check()
        needs = plan.needs
        if draft_model := find_draft_model(stored, tokenizer, settings, progress):
            draft = draft_plan(draft_model, options)
            options = replace(options, draft_memory=draft.least)
            needs = replace(
                needs, weights=needs.weights + draft.weights, steps=needs.steps + draft.least - draft.weights
            )
        sampling = catalogued_sampling(stored.name, stored.path, load_catalog()) or read_sampling(stored.path, values)
        prepare_kernels(layouts_to_compile(checkpoint, options), options, progress)
        options = _keeping_on_disk(options, stored, settings, progress)
        with compare_with_plan(plan, stored.name), loading(stored, progress) as reports:
            options = replace(options, report_kernels=reports.compiled)
            engine = load_engine(checkpoint, options, reports.read, parked=parked)
    with ExitStack() as loaded:
        loaded.callback(engine.close)
        if draft_model is not None:
            add_draft_model(engine, draft_model, options, progress)
        record_use(stored, settings.models_dir)
        if tokenizer.vocab_size > engine.vocab_size:
            raise UnsupportedModel(
                f"{stored.path} has a vocabulary of {tokenizer.vocab_size} tokens, but its model has "
                f"{engine.vocab_size}",
                "Try another file of this model.",
            )
        config = engine.config
        if settings.context > config.model_context_length:
            progress.say(lowered_context(settings, config.model_context_length))
        if not settings.context and config.context_length < config.model_context_length:
            progress.say(shortened_context(config))
        loaded.pop_all()
    return ChatModel(stored.name, engine, tokenizer, sampling or DEFAULT_SAMPLING, plan.active_weights, needs)


def shortened_context(config: EngineConfig) -> str:
    """Return why the context is shorter than the model's, and how to raise it if that is possible."""
    if config.longest_context > config.context_length:
        return (
            f"The context is {config.context_length:,} tokens, because by default the KV cache leaves memory of the "
            f"GPU to other programs. Raise it with --context, up to {config.longest_context:,}, or with "
            "--gpu-memory 90%."
        )
    return (
        f"The context is limited to {config.context_length:,} tokens, because the {config.model_context_length:,} "
        "tokens of the model do not fit in memory."
    )


def compile_for_gpu(stored: StoredModel, settings: Settings, progress: Progress) -> None:
    """Compile the kernels of a chat model for the GPU that would run it, so that its first start need not wait.

    Does nothing if there is no such GPU. Says if the model does not fit it. Other problems are logged only: a start
    reports them.
    """
    try:
        with open_checkpoint(stored.path, settings.quantize_method) as checkpoint:
            read_config(checkpoint.metadata)
            with loading(stored, progress) as reports:
                options = replace(chat_options(settings), report_kernels=reports.compiled)
                compile_gpu_kernels(checkpoint, options, reports.read)
    except OutOfMemory as problem:
        progress.say(f"The kernels of {stored.name} were not compiled for the GPU. {problem.message}.")
    except Exception as problem:  # noqa: BLE001 # the model has been downloaded, whatever the GPU does
        log.info("the kernels of %s were not compiled: %s", stored.name, problem)


def _keeping_on_disk(options: LoadOptions, stored: StoredModel, settings: Settings, progress: Progress) -> LoadOptions:
    """Return the options with those of the on-disk KV cache: its folder, its limit, and the digest of the weights."""
    limit = settings.kv_disk_limit
    if limit == 0:  # only this process needs to recognize the model, for a parked cache
        return replace(options, fingerprint=_identity(stored))
    digest = stored.sha256 or digest_of(stored.weights(), settings.models_dir / DIGESTS, progress)
    return replace(options, fingerprint=digest, disk=DiskOptions(settings.kv_disk_dir, limit, stored.title))


def _identity(stored: StoredModel) -> str:
    """Return a text that changes when the files of a model change."""
    states = [(str(path), path.stat()) for path in stored.weights()]
    return repr([(name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states])
