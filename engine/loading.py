"""From an open checkpoint to a running engine: which backend, how much memory, which model.

The one place where these choices are made. Refuses to know where the file came from and what a user typed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine import models
from engine.checkpoint_config import Metadata
from engine.config import BLOCK_SIZE, EngineConfig, ModelConfig
from engine.core import Engine
from engine.errors import UnsupportedModel
from engine.kv_cache import KVCache
from engine.operations import Operations, ReferenceOperations
from engine.runner import ModelRunner, Ticket
from engine.weights import GGUFWeights, LoadProgress
from quant.gguf import GGUFFile

ModelEngine = Engine[Ticket]

ASSUMED_MEMORY = 8 << 30  # bytes, where the system does not tell how much is free
KV_SHARE = 0.5  # of the free memory: the most that the cache may grow to
LEAST_CONTEXT = 512  # tokens
KV_TYPE = torch.float32

# Raised when a change of the kernels changes the bits they compute: cached keys and values of before are not used.
NUMERICS_VERSION = 1


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the composition root asks for. Zero means: choose."""

    backend: str = "auto"
    context_length: int = 0
    threads: int = 0


def load_engine(file: GGUFFile, options: LoadOptions, progress: LoadProgress | None = None) -> ModelEngine:
    """The engine for an open GGUF file. Raises UnsupportedModel or ModelFileError; nothing stays allocated then."""
    model_config = models.read_config(Metadata(file.metadata, _architecture(file)))
    config = resolve(model_config, options, file.header_digest)
    operations = _operations(config.backend, model_config)
    with _threads(1):  # tensors are small: more threads gain little, and lose much while another program has a core
        model = models.load(model_config, GGUFWeights(file, progress), operations, config.context_length)
    torch.set_num_threads(options.threads or _spare_threads())
    kv = KVCache(model.kv_groups(), config.num_blocks, KV_TYPE)
    return Engine(config, model_config.vocab_size, ModelRunner(model, kv))


def resolve(model: ModelConfig, options: LoadOptions, fingerprint: str) -> EngineConfig:
    """The knobs of a run, with every choice made. Raises UnsupportedModel for a context that memory cannot hold."""
    backend = "reference" if options.backend == "auto" else options.backend
    context = _context(model, options.context_length)
    return EngineConfig(
        backend=backend,
        context_length=context,
        num_blocks=1 + -(-context // BLOCK_SIZE),
        model_context_length=model.context_length,
        cache_salt=(fingerprint, backend, str(NUMERICS_VERSION), str(KV_TYPE), repr(model.rope)),
    )


def _context(model: ModelConfig, asked: int) -> int:
    """What is asked for, else what the model was made for, as far as half of the memory there is holds its cache."""
    wanted = min(asked or model.context_length, model.context_length)
    fits = int(available_memory() * KV_SHARE) // token_bytes(model)
    if wanted <= fits:
        return wanted
    if asked or fits < LEAST_CONTEXT:
        raise UnsupportedModel(
            f"A context of {wanted:,} tokens needs {wanted * token_bytes(model) / 1e9:.1f} GB of memory for its cache; "
            f"there is room for {fits:,} tokens",
            "Choose a shorter context with --context, or close other programs.",
        )
    return fits


def token_bytes(model: ModelConfig) -> int:
    """Bytes that one token of context takes: keys and values of every layer, and its row of the rotary table."""
    return (2 * model.layers * model.kv_heads + 1) * model.head_dim * KV_TYPE.itemsize


def _spare_threads() -> int:
    """Half of the cores: torch's threads wait for each other, so one that shares its core stops them all."""
    return max(1, (os.cpu_count() or 1) // 2)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """torch's own threads, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _architecture(file: GGUFFile) -> str:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise UnsupportedModel(f"{file.path} does not name its architecture (general.architecture)")
    return architecture


def _operations(backend: str, model: ModelConfig) -> Operations:
    if backend != "reference":
        raise UnsupportedModel(f"There is no kernel backend {backend!r}", "Use --kernels auto.")
    return ReferenceOperations(keep_dequantized=float32_bytes(model) <= available_memory() // 2)


def float32_bytes(model: ModelConfig) -> int:
    """About how many bytes the model's matrices take as float32."""
    attention = 2 * (model.heads + model.kv_heads) * model.head_dim * model.hidden
    mlp = 3 * model.mlp_hidden * model.hidden
    return 4 * (model.layers * (attention + mlp) + 2 * model.vocab_size * model.hidden)


def available_memory() -> int:
    """Bytes of memory that can be taken without swapping, as far as the system tells."""
    try:
        # What the kernel would give to a new program: page cache counts, unlike in sysconf's free pages.
        with open("/proc/meminfo", encoding="ascii") as table:
            kibibytes = next(line.split()[1] for line in table if line.startswith("MemAvailable:"))
        return int(kibibytes) << 10
    except (OSError, StopIteration, ValueError):
        return ASSUMED_MEMORY
