"""Load an embedding model from an open checkpoint: choose its family, kernels, and number of threads.

`engine.loading` does the same for models that generate text.
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from engine.backends.device_choice import (
    check_backend,
    gpu_for,
    layouts_to_compile,
    physical_cores,
    wants_cpu_kernels,
)
from engine.backends.device_errors import raising_out_of_memory
from engine.checkpoints.checkpoint import Checkpoint, Names, StoredWeight
from engine.checkpoints.metadata import Metadata
from engine.checkpoints.weights import LoadProgress, Weights, matrix_samples
from engine.config import default_activation_bits
from engine.embedding.decoder_embedder import load_decoder_embedder
from engine.embedding.encoder import Embedder, Encoder, EncoderModel, Pooling
from engine.embedding.pooling import PoolingConfig, has_pooling_config, is_cross_encoder, read_pooling
from engine.errors import UnsupportedModel
from engine.freed_memory import FreeingOnError
from engine.load_options import LoadOptions
from engine.model_config import EncoderConfig
from engine.models import ENCODERS
from engine.system_memory import available_memory
from quant.cpu import tiers
from quant.cpu.ggml_formats import GROUP
from quant.cpu.layouts import Layout, layouts_of
from quant.errors import UnsupportedQuantization
from quant.linear import LinearBackend, ReferenceBackend

if TYPE_CHECKING:
    from engine.backends.cuda.gpu import Gpu

log = logging.getLogger(__name__)

GPU_WIDTH = 16  # GPU kernels require every width to be a multiple of this


class _Loads(Protocol):
    """The interface of an encoder family's class `Model`."""

    def load(self, config: EncoderConfig, weights: Weights, backend: LinearBackend) -> EncoderModel: ...


class _LoadsHead(Protocol):
    """The interface of an encoder family's class `RankingHead`."""

    def load(self, config: EncoderConfig, weights: Weights, backend: LinearBackend) -> Callable[[Tensor], Tensor]: ...


class Family(Protocol):
    """The interface of an encoder family's module."""

    NAMES: Names
    RANKING_NAMES: Names  # tensor names of cross-encoders
    Model: _Loads
    RankingHead: _LoadsHead

    def read_config(self, metadata: Metadata) -> EncoderConfig: ...


def is_embedding_model(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint's model returns vectors instead of text.

    It is an encoder, or a decoder whose checkpoint describes how its states are pooled.
    """
    return _is_encoder(checkpoint) or has_pooling_config(checkpoint.path, checkpoint.metadata)


def load_embedder(checkpoint: Checkpoint, options: LoadOptions, progress: LoadProgress | None = None) -> Embedder:
    """Load the embedder for an open checkpoint for which `is_embedding_model` returns True.

    Raises UnsupportedModel, UnsupportedTier, ModelFileError, OutOfMemory, or LoadStopped, after releasing everything it
    allocated.
    """
    if _is_encoder(checkpoint):
        return load_encoder(checkpoint, options, progress)
    pooling = read_pooling(checkpoint.path, checkpoint.metadata)
    if pooling.pooling is not Pooling.LAST:
        raise UnsupportedModel(
            f"{checkpoint.path} asks for the pooling mode {pooling.pooling.value}, which decoders do not support",
            "Decoders support the pooling of the last token's state only.",
        )
    if not options.context_length and pooling.max_tokens:
        options = replace(options, context_length=pooling.max_tokens + 1)
    return load_decoder_embedder(checkpoint, options, progress)


def _is_encoder(checkpoint: Checkpoint) -> bool:
    return checkpoint.metadata.architecture in ENCODERS


def load_encoder(checkpoint: Checkpoint, options: LoadOptions, progress: LoadProgress | None = None) -> Encoder:
    """Load the encoder for an open checkpoint of an encoder family.

    Raises the errors of `load_embedder`.
    """
    with FreeingOnError(), raising_out_of_memory():
        family = _family(checkpoint)
        config = family.read_config(checkpoint.metadata)
        ranks = is_cross_encoder(checkpoint.metadata)
        pooling = PoolingConfig() if ranks else read_pooling(checkpoint.path, checkpoint.metadata)
        stored = checkpoint.weights(_names(family, checkpoint))
        threads = options.threads or physical_cores()
        weights = Weights(checkpoint.path, stored, progress, threads, options.control)
        gpu = _gpu(options, config)
        backend = _backend(checkpoint, options, config, stored) if gpu is None else _gpu_backend(gpu, options)
        model = family.Model.load(config, weights, backend)
        head = family.RankingHead.load(config, weights, backend) if ranks else None
        weights.finish()
    longest = min(config.context_length, pooling.max_tokens or config.context_length)
    context = min(longest, options.context_length or longest)
    if gpu is None:
        turn = options.turns.join() if options.turns else None
        return Encoder(model, pooling.pooling, context, threads, head=head, turn=turn)
    return Encoder(
        model,
        pooling.pooling,
        context,
        threads=1,
        initializer=gpu.make_current,
        head=head,
        synchronize=gpu.synchronize,
        drop_caches=gpu.drop_caches,
    )


def embedder_layouts(checkpoint: Checkpoint, options: LoadOptions) -> frozenset[Layout] | None:
    """Return the layouts of the CPU kernels that loading will need, or None if the model will not use CPU kernels.

    Raises UnsupportedModel, UnsupportedQuantization, or ModelFileError.
    """
    if not _is_encoder(checkpoint):
        return layouts_to_compile(checkpoint, options)
    family = _family(checkpoint)
    stored = checkpoint.weights(_names(family, checkpoint))
    unfit = options.backend == "auto" and _why_unsupported(family.read_config(checkpoint.metadata), stored)
    return None if unfit or not wants_cpu_kernels(options) else layouts_of(matrix_samples(stored))


def _family(checkpoint: Checkpoint) -> Family:
    family: Family = importlib.import_module(ENCODERS[checkpoint.metadata.architecture])
    return family


def _names(family: Family, checkpoint: Checkpoint) -> Names:
    return family.RANKING_NAMES if is_cross_encoder(checkpoint.metadata) else family.NAMES


def _gpu(options: LoadOptions, config: EncoderConfig) -> "Gpu | None":
    """Return the GPU to compute the model on, or None to compute it on the host."""
    gpu = gpu_for(options)
    odd = [width for width in (config.hidden, config.mlp_hidden) if width % GPU_WIDTH]
    if gpu is None or not odd:
        return gpu
    problem = f"a width of the model is {odd[0]}, not a multiple of {GPU_WIDTH}"
    if options.asks_for_gpu:
        raise UnsupportedModel(f"The GPU kernels cannot run this model: {problem}", "Use --device cpu.")
    log.warning("%s is not used: %s", gpu.card.name, problem)
    return None


def _gpu_backend(gpu: "Gpu", options: LoadOptions) -> LinearBackend:
    from quant.cuda.backend import CudaBackend

    return CudaBackend(gpu.device, gpu.card, options.deterministic)


def _backend(
    checkpoint: Checkpoint, options: LoadOptions, config: EncoderConfig, stored: Mapping[str, StoredWeight]
) -> LinearBackend:
    """Return the backend for the CPU kernels, or for the reference kernels if the CPU kernels cannot run the model.

    The reference kernels are used only if the options allow it.
    """
    check_backend(options)
    if wants_cpu_kernels(options):
        problem = _why_unsupported(config, stored)
        if problem is None:
            return _cpu_backend(options, config, stored)
        if options.backend == "cpu":
            raise UnsupportedModel(
                f"The fast CPU kernels cannot run {checkpoint.path}: {problem}", "Use --kernels auto."
            )
        log.warning("falling back to the slow reference kernels: %s", problem)
    return ReferenceBackend(keep_dequantized=4 * config.matrix_elements <= available_memory() // 2)


def _why_unsupported(config: EncoderConfig, stored: Mapping[str, StoredWeight]) -> str | None:
    """Return why the CPU kernels cannot run a checkpoint, or None if they can."""
    for name, width in (("hidden size", config.hidden), ("MLP", config.mlp_hidden)):
        if width % GROUP:
            return f"its {name} is {width}, not a multiple of {GROUP}"
    try:
        layouts_of(matrix_samples(stored))
    except UnsupportedQuantization as problem:
        return problem.message
    return None


def _cpu_backend(options: LoadOptions, config: EncoderConfig, stored: Mapping[str, StoredWeight]) -> LinearBackend:
    from engine.backends.cpu.code_cache import load_code
    from engine.backends.cpu.device import ACTIVATION_FORMS
    from quant.cpu.arena import Arena
    from quant.cpu.linear import CpuBackend

    load_code(options.code_cache, tiers.choose(options.cpu_tier), layouts_of(matrix_samples(stored)))
    bits = options.activation_bits or default_activation_bits(config.matrix_elements)
    return CpuBackend(Arena(), ACTIVATION_FORMS[bits])
