"""The CPU device: records a model as a program, and runs it for each batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import models
from engine.backends.cpu.attention import PIECE, QUERIES
from engine.backends.cpu.code_cache import load_code, load_draw
from engine.backends.cpu.instructions import COUNTS, DIVIDED_TOKENS, HEADER, TILE_WORDS, WHOLE, Limits, Op
from engine.backends.cpu.memory import packed_bytes, step_bytes
from engine.backends.cpu.operations import CpuOperations, LogitRows, block_shape
from engine.backends.cpu.program import Program
from engine.backends.cpu.thread_pool import ProgramRunner
from engine.backends.cpu.token_draw import CompiledDraw
from engine.backends.runner import ModelRunner
from engine.batch import Batch, placeholder_batch
from engine.checkpoints.checkpoint import StoredWeight
from engine.checkpoints.weights import Weights
from engine.config import BLOCK_SIZE, EngineConfig, GroupConfig
from engine.cpu_threads import MAX_POOL_THREADS, ThreadPool
from engine.device import LoadedModel, Needs
from engine.kv.budget import ANY_MEMORY, MAX_RUNNING, HostMemory
from engine.kv.cache import KVCache, LayerBlock, kv_groups
from engine.mixer_config import AttentionConfig, CacheConfig, ConvConfig, DeltaConfig
from engine.model_config import ExpertConfig, HeadNorm, MLPConfig, ModelConfig
from engine.sampling.drawing import Draw, Logits
from quant.cpu.activations import GROUP, Form
from quant.cpu.arena import Arena
from quant.cpu.layouts import layouts_of
from quant.cpu.linear import CpuBackend
from quant.cpu.native import Entry
from quant.cpu.tiers import Target
from quant.cpu.vector import LANES
from quant.errors import UnsupportedQuantization
from quant.tensor import QTensor

NUMERICS_VERSION = "3"  # increase when a change to the kernels changes result bits, to invalidate KV caches on disk
STEP_OPERATIONS = 80_000_000_000  # operations that one thread computes in 0.2 s
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 32, 512
EXPERT_TOKENS = 4
STATES = 2  # entries of a request's table in a group of states: those that a step reads and writes
MIN_HEAD_DIM = 32  # smaller heads occur only in test models
ACTIVATION_FORMS = {8: Form.BITS_8, 14: Form.BITS_14}  # keyed by the number of bits per activation
LOCAL_PIECES = 16  # with at most this many pieces, every thread merges them itself instead of waiting for others


class CpuDevice:
    """See `engine.device.Device`."""

    name = "cpu"
    max_running = MAX_RUNNING
    max_logit_rows = 0  # unlimited
    kv_share = 1.0  # of a share of the host's memory
    contexts = step_depth = 1

    def __init__(
        self,
        threads: int,
        activation_bits: int,
        target: Target,
        code_cache: Path | None,
        kv_type: torch.dtype = torch.float16,
        memory: HostMemory = ANY_MEMORY,
        pool: ThreadPool | None = None,  # None: each model gets its own threads
    ) -> None:
        self._pool = pool
        self.threads = min(threads, MAX_POOL_THREADS)
        self._form = ACTIVATION_FORMS[activation_bits]
        self.numerics = ("cpu", NUMERICS_VERSION, target.tier, f"{self._form.planes} planes")
        self.kv_type = kv_type
        self._target = target
        self._code_cache = code_cache
        self._memory = memory

    def layer_block(self, cache: CacheConfig) -> LayerBlock:
        return LayerBlock(block_shape(self.kv_type, cache.kv_heads, cache.head_dim), self.kv_type)

    def step_tokens(self, model: ModelConfig) -> int:
        """Return the number of tokens, a power of two, whose step takes about 0.2 s.

        Longer steps gain little throughput, except for experts: a step reads nearly all of them, so each should
        multiply EXPERT_TOKENS tokens on average.
        """
        tokens = max(
            MIN_STEP_TOKENS,
            self.threads * STEP_OPERATIONS // (2 * model.active_elements),
            EXPERT_TOKENS * max(_tokens_per_expert(layer.mlp) for layer in model.layers),
        )
        return min(1 << tokens.bit_length() - 1, MAX_STEP_TOKENS)

    def free_memory(self) -> int:
        return self._memory.limit

    def host_pool(self, weights: int) -> int:
        return self._memory.pools or 0

    def needs(self, model: ModelConfig, stored: Mapping[str, StoredWeight]) -> Needs:
        return Needs(self.weight_bytes(stored), self._step_bytes(model), self._memory.loading)

    def weight_bytes(self, stored: Mapping[str, StoredWeight]) -> int:
        return packed_bytes(stored)

    def kv_memory(self, model: ModelConfig, weight_bytes: int) -> int:
        return self._memory.kv_bytes(weight_bytes, self._step_bytes(model))

    def _step_bytes(self, model: ModelConfig) -> int:
        return step_bytes(model, self.step_tokens(model), self.max_running)

    def load(
        self, model: ModelConfig, weights: Weights, config: EngineConfig, pools: Sequence[Tensor] = ()
    ) -> LoadedModel:
        torch.set_num_threads(1)  # torch only samples here; its other threads would spin on the cores of the pool
        enter, arena = load_code(self._code_cache, self._target, layouts_of(weights.matrix_samples())), Arena()
        limits = Limits(
            tokens=config.max_step_tokens,
            outputs=config.max_step_tokens,
            requests=config.max_running,
            context=config.context_length,
            num_blocks=config.pool_sizes,
            threads=self.threads,
        )
        program = Program(arena, limits)
        operations = CpuOperations(CpuBackend(arena, self._form), program)
        loaded = models.load(model, weights, operations, config.context_length)
        kv = KVCache(kv_groups(model, self.layer_block), config.pool_sizes, config.host_pool_sizes, pools=pools)
        logits: LogitRows = loaded.forward(placeholder_batch(), kv)
        draw = CompiledDraw(load_draw(self._code_cache, self._target), logits.vocabulary)
        step = CpuStep(enter, program, kv, logits, draw, self._pool)
        return LoadedModel(step, kv, close=step.workers.close)

    def runner(self, loaded: LoadedModel, vocab_size: int, groups: Sequence[GroupConfig]) -> ModelRunner:
        return ModelRunner(loaded, vocab_size, groups)


def _tokens_per_expert(mlp: MLPConfig | ExpertConfig) -> int:
    """Return the number of tokens for which each expert computes one on average."""
    return mlp.routing.experts // mlp.active if isinstance(mlp, ExpertConfig) else 1


class CpuStep:
    """Computes batches: fills the step header, runs the program on the thread pool, and returns views of the logits."""

    def __init__(
        self,
        enter: Entry,
        program: Program,
        kv: KVCache,
        logits: LogitRows,
        draw: Draw | None = None,
        threads: ThreadPool | None = None,
    ) -> None:
        arena, limits = program.arena, program.limits
        for pool in kv.pools:
            arena.adopt("KV cache", pool.view(torch.uint8).flatten().numpy())
        self._kv = kv
        self._draw = draw
        self._limits = limits
        self.arena = arena
        scratch = -(-program.scratch_bytes() // 4096) * 4096
        blocks = max(-(-limits.context // BLOCK_SIZE), STATES)

        def words(name: str, *shape: int) -> NDArray[Any]:
            return arena.allocate(name, 8 * int(np.prod(shape))).view(np.int64, *shape)

        self._header = arena.allocate("header", HEADER.itemsize).view(HEADER, 1)
        self._token_ids, self._positions = words("token ids", limits.tokens), words("positions", limits.tokens)
        self._slots = words("slots", len(kv.groups), limits.tokens)
        self._starts = words("query starts", limits.requests + 1)
        self._outputs, self._output_positions = (words(it, limits.outputs) for it in ("output rows", "their positions"))
        self._tiles, self._output_tiles = (
            words(name, count, TILE_WORDS)
            for name, count in (("tiles", limits.tokens), ("their tiles", limits.outputs))
        )
        self._tables = words("block tables", len(kv.groups), limits.requests, blocks)
        self._counts = self._header.view(np.int64)[: len(COUNTS)]
        self._tables_there: list[list[Sequence[int]]] = [[[]] * limits.requests for _ in kv.groups]
        header = self._header[0]
        for name, array in (
            ("token_ids", self._token_ids), ("positions", self._positions), ("slots", self._slots),
            ("output_rows", self._outputs), ("output_positions", self._output_positions), ("tile_list", self._tiles),
            ("output_tile_list", self._output_tiles), ("query_starts", self._starts), ("tables", self._tables),
        ):  # fmt: skip
            header[name] = array.ctypes.data
        header["slot_group"], header["table_group"] = self._slots.strides[0], self._tables.strides[0]
        header["table_stride"], header["scratch_stride"] = self._tables.strides[1], scratch
        header["scratch"] = arena.allocate("scratch", scratch * limits.threads).address
        self._values = torch.from_numpy(logits.logits.view(np.float32, limits.outputs, logits.vocabulary))
        self._best = logits.best.view(np.int64, limits.outputs)
        instructions = program.finish()
        self._attends_outputs = bool(instructions["selected"][instructions["op"] == Op.ATTEND].any())
        self.workers = ProgramRunner(enter, instructions, self._header, limits.threads, threads)

    def __call__(self, batch: Batch) -> Logits:
        self.fill(batch)
        self.workers.run(len(batch.token_ids))
        return self.logits(len(batch.logit_rows))

    def fill(self, batch: Batch) -> None:
        """Write a batch into the header. Raises IndexError if it exceeds the limits of the recorded program."""
        tokens, outputs, requests = len(batch.token_ids), len(batch.logit_rows), len(batch.context_lengths)
        limits = self._limits
        if tokens > limits.tokens or requests > limits.requests or max(batch.context_lengths) > limits.context:
            raise IndexError(f"{tokens} tokens of {requests} requests, or their contexts, exceed the recorded limits")
        if max(len(table) for tables in batch.block_tables for table in tables) > self._tables.shape[2]:
            raise IndexError("a block table is longer than the recorded limit")
        self._token_ids[:tokens] = batch.token_ids
        self._positions[:tokens] = batch.positions
        self._outputs[:outputs] = batch.logit_rows
        if self._attends_outputs:
            self._output_positions[:outputs] = self._positions[self._outputs[:outputs]]
            self._output_tiles[:outputs] = _output_tiles(batch, limits.slots)
        self._starts[: requests + 1] = batch.query_starts
        for slots, mapping in zip(self._slots, batch.slot_mappings, strict=True):
            slots[: len(mapping)] = mapping
        for there, rows, tables in zip(self._tables_there, self._tables, batch.block_tables, strict=True):
            for number, table in enumerate(tables):
                if there[number] != table:  # usually the table is the same as in the previous step
                    there[number] = list(table)
                    rows[number, : len(table)] = table
        tiles = _tiles(batch)
        self._tiles[: len(tiles)] = tiles
        local = tokens == 1 and outputs <= 1 and batch.context_lengths[0] <= LOCAL_PIECES * PIECE
        self._counts[:] = tokens, outputs, len(tiles), outputs, requests, local

    def logits(self, rows: int) -> Logits:
        """Return the logits of the last step. They are valid until the next step."""
        return Logits(self._values, self._best[:rows].tolist(), rows, self._draw)


def _output_tiles(batch: Batch, slots: int) -> NDArray[Any]:
    """Return the tile of each output row (see `_tiles`). Rows for which there is no slot are not divided."""
    rows = np.arange(len(batch.logit_rows))
    requests = np.searchsorted(batch.query_starts, batch.logit_rows, side="right") - 1
    return np.stack([rows, np.ones_like(rows), requests, np.where(rows < slots, rows, WHOLE)], axis=1)


def _tiles(batch: Batch) -> list[tuple[int, int, int, int]]:
    """Return (first token, number of tokens, request, slot) of each tile: up to QUERIES tokens of one request.

    All tiles of a short step are divided into pieces, and the tiles of single tokens in any step.
    """
    tiles, slot = [], 0
    longest = QUERIES if len(batch.token_ids) <= DIVIDED_TOKENS else 1  # the longest tile that is divided
    for request, (start, stop) in enumerate(pairwise(batch.query_starts)):
        for first in range(start, stop, QUERIES):
            tokens = min(QUERIES, stop - first)
            divided = tokens <= longest
            tiles.append((first, tokens, request, slot if divided else WHOLE))
            slot += tokens if divided else 0
    return tiles


def why_unsupported(model: ModelConfig, samples: Iterable[QTensor]) -> str | None:
    """Return why the CPU kernels cannot run a checkpoint, or None if they can."""
    smallest = min(attention.head_dim for attention in model.attentions)
    if smallest < MIN_HEAD_DIM:
        return f"its head dimension is {smallest}, less than {MIN_HEAD_DIM}"
    for name, width, of in _widths(model):
        if width % of:
            return f"its {name} is {width}, not a multiple of {of}"
    try:
        layouts_of(samples)
    except UnsupportedQuantization as error:
        return str(error)
    return None


def _widths(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Yield (name, width, required multiple) for the widths of a model."""
    yield "hidden size", model.hidden, GROUP
    for width in model.mlp_widths:
        yield "MLP", width, GROUP
    for mixer in model.mixers:
        match mixer:
            case AttentionConfig():
                yield "head dimension", mixer.head_dim, LANES
                yield "attention's width", mixer.width, GROUP
                if model.head_norm in (HeadNorm.EACH, HeadNorm.OWN) and not model.optional_head_norm:
                    yield "normalized heads' dimension", mixer.head_dim, GROUP
                if model.head_norm is HeadNorm.ALL:
                    yield "keys' width", mixer.kv_width, GROUP
            case ConvConfig():
                yield "convolution's width", mixer.width, GROUP
            case DeltaConfig():
                yield "keys' dimension", mixer.key_dim, GROUP
                yield "values' dimension", mixer.value_dim, GROUP
