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

# The fallback where the system does not tell how much memory is free.
ASSUMED_MEMORY = 8 << 30


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the composition root asks for. Zero means: choose."""

    backend: str = "auto"
    context_length: int = 0
    threads: int = 0


def load_engine(file: GGUFFile, options: LoadOptions, progress: LoadProgress | None = None) -> ModelEngine:
    """The engine for an open GGUF file. Raises UnsupportedModel or ModelFileError; nothing stays allocated then."""
    model_config = models.read_config(Metadata(file.metadata, _architecture(file)))
    config = resolve(model_config, options)
    operations = _operations(config.backend, model_config)
    with _threads(1):  # tensors are small: more threads gain little, and lose much while another program has a core
        model = models.load(model_config, GGUFWeights(file, progress), operations, config.context_length)
    torch.set_num_threads(options.threads or _spare_threads())
    kv = KVCache(model.kv_groups(), config.num_blocks, torch.float32)
    return Engine(config, model_config.vocab_size, ModelRunner(model, kv))


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


def resolve(model: ModelConfig, options: LoadOptions) -> EngineConfig:
    """The knobs of a run, with every choice made."""
    context = min(options.context_length or model.context_length, model.context_length)
    return EngineConfig(
        backend="reference" if options.backend == "auto" else options.backend,
        context_length=context,
        num_blocks=1 + -(-context // BLOCK_SIZE),
    )


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
