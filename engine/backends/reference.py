"""The reference device: plain torch on the CPU.

It is the oracle of tests, and the fallback for models and platforms that the fast kernels do not support. Products and
attention are in `engine.kernels.reference`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import models
from engine.backends.runner import ModelRunner
from engine.batch import Batch, selected_batch
from engine.checkpoints.checkpoint import StoredWeight, stored_bytes
from engine.checkpoints.weights import Weights
from engine.config import BLOCK_SIZE, EngineConfig, GroupConfig
from engine.device import LoadedModel, Needs
from engine.kernels import reference
from engine.kv.budget import ANY_MEMORY, MAX_RUNNING, HostMemory
from engine.kv.cache import KVCache, LayerBlock, LayerKV, LayerState, kv_groups
from engine.mixer_config import CacheConfig
from engine.model_config import Gate, ModelConfig
from engine.operations import Attention, DeltaRule, ExpertBiases, ExpertMLP, GatedMLP, Norm, Router, ShortConv
from engine.rope import RotaryTable
from engine.sampling.drawing import Logits
from quant.linear import LinearBackend, QLinear, ReferenceBackend


class ReferenceDevice:
    """See `engine.device.Device`."""

    name = "reference"
    max_running = MAX_RUNNING
    max_logit_rows = 0  # unlimited
    kv_share = 1.0  # of a share of the host's memory
    contexts = step_depth = 1
    kv_type = torch.float32
    numerics = ("reference", "2")  # increase the number when a change to the kernels changes result bits

    def __init__(self, *, keep_dequantized: bool, threads: int, memory: HostMemory = ANY_MEMORY) -> None:
        self.threads = threads
        self._memory = memory
        self._keep_dequantized = keep_dequantized

    def layer_block(self, cache: CacheConfig) -> LayerBlock:
        return LayerBlock((2, cache.kv_heads, BLOCK_SIZE, cache.head_dim), self.kv_type)  # k, v

    def step_tokens(self, model: ModelConfig) -> int:
        return 256

    def free_memory(self) -> int:
        return self._memory.limit

    def host_pool(self, weights: int) -> int:
        return self._memory.pools or 0

    def needs(self, model: ModelConfig, stored: Mapping[str, StoredWeight]) -> Needs:
        return Needs(self._loaded(model, self.weight_bytes(stored)), 0)

    def weight_bytes(self, stored: Mapping[str, StoredWeight]) -> int:
        return stored_bytes(stored)

    def kv_memory(self, model: ModelConfig, weight_bytes: int) -> int:
        return self._memory.kv_bytes(self._loaded(model, weight_bytes), 0)

    def _loaded(self, model: ModelConfig, weight_bytes: int) -> int:
        # vectors are no matrix elements, so a file of float32 tensors is larger than its matrices
        return max(4 * model.matrix_elements, weight_bytes) if self._keep_dequantized else weight_bytes

    def load(
        self, model: ModelConfig, weights: Weights, config: EngineConfig, pools: Sequence[Tensor] = ()
    ) -> LoadedModel:
        # Tensors are small here: more threads gain little, and are much slower while another program uses a core.
        torch.set_num_threads(1)
        loaded = models.load(
            model, weights, ReferenceOperations(keep_dequantized=self._keep_dequantized), config.context_length
        )
        torch.set_num_threads(self.threads)
        kv = KVCache(kv_groups(model, self.layer_block), config.pool_sizes, config.host_pool_sizes, pools=pools)

        def compute(batch: Batch) -> Logits:
            with torch.inference_mode():
                return Logits(loaded.forward(batch, kv))

        return LoadedModel(compute, kv)

    def runner(self, loaded: LoadedModel, vocab_size: int, groups: Sequence[GroupConfig]) -> ModelRunner:
        return ModelRunner(loaded, vocab_size, groups)


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of every token. See `engine.kernels.reference.route`."""

    ids: Tensor  # int64 [tokens, active], ascending
    weights: Tensor  # float32 [tokens, active]
    shared: Tensor | None  # weight of the shared MLP, float32 [tokens, 1]; None: 1


class ReferenceOperations:
    """Computes each operation immediately. Activations are tensors, float32 [tokens, width]."""

    def __init__(self, *, keep_dequantized: bool) -> None:
        self.weights: LinearBackend = ReferenceBackend(keep_dequantized=keep_dequantized)

    def embed(self, batch: Batch, table: QLinear, scale: float = 1.0) -> Tensor:
        return table.rows(torch.tensor(batch.token_ids)) * scale

    def norm(self, x: Tensor, norm: Norm, add_to: Tensor | None = None) -> Tensor:
        parts = x.reshape(-1, norm.weight.shape[-1])
        normed = reference.normalize(parts, norm).view(x.shape)
        return normed if add_to is None else (add_to + normed) * norm.sum_scale

    def linear(
        self,
        x: Tensor,
        weight: QLinear,
        add_to: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        in_float32: bool = False,
    ) -> Tensor:
        product = weight.forward(x)
        return _added(product if bias is None else product + bias, add_to)

    def rope_and_store(self, qkv: Tensor, batch: Batch, kv: LayerKV, attention: Attention) -> Tensor:
        kv_width, norms, rotary = kv.kv_heads * kv.head_dim, attention.norms, attention.rotary
        positions = torch.tensor(batch.positions, dtype=torch.int64)

        def heads(x: Tensor, norm: Norm | None, table: RotaryTable | None) -> Tensor:
            x = x if norm is None else reference.normalize_heads(x.contiguous(), norm, kv.head_dim)
            x = x.reshape(len(x), x.shape[1] // kv.head_dim, kv.head_dim)
            if table is None:
                return x
            cos, sin = table.cos[positions], table.sin[positions]
            return reference.rope(x, cos, sin, interleaved=table.interleaved, distance=table.distance)

        if not attention.shared:
            q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_width, kv_width, kv_width], dim=1)
            k, v = heads(k, norms.k if norms else None, rotary), heads(v, norms.v if norms else None, None)
            reference.store_kv(kv.pool, torch.tensor(batch.slot_mappings[kv.group]), k, v)
            qkv = q
        return heads(qkv, norms.q if norms else None, rotary)

    def attend(self, q: Tensor, batch: Batch, kv: LayerKV, attention: Attention) -> Tensor:
        starts, positions = batch.query_starts, torch.tensor(batch.positions, dtype=torch.int64)
        tables = [torch.tensor(table) for table in batch.block_tables[kv.group]]
        rule = reference.ScoreRule(attention.scale, attention.softcap, attention.window)
        attended = [
            reference.paged_attention(
                q[start:stop], positions[start:stop], kv.pool, table, context, rule, attention.sinks
            )
            for start, stop, table, context in zip(starts, starts[1:], tables, batch.context_lengths, strict=False)
        ]
        return torch.cat([q[:0], *attended]).flatten(1)

    def convolve(self, x: Tensor, batch: Batch, state: LayerState, conv: ShortConv) -> Tensor:
        return reference.short_convolution(x, state.pool, *_states(batch, state), conv.weight)

    def delta_rule(self, x: Tensor, batch: Batch, state: LayerState, delta: DeltaRule) -> Tensor:
        return reference.gated_delta_rule(x, state.pool, *_states(batch, state), delta)

    def scale(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * reference.sigmoid(gate)

    def gate_part(self, x: Tensor, values: Tensor, part: int, gate: Gate) -> Tensor:
        return reference.gated_product(x, values[:, part * x.shape[1] : (part + 1) * x.shape[1]], gate)

    def gated_mlp(self, x: Tensor, mlp: GatedMLP, add_to: Tensor | None = None, gate: Gate = Gate.SILU) -> Tensor:
        return _added(_mlp(x, mlp, gate), add_to)

    def route(self, x: Tensor, router: Router) -> Routes:
        logits, experts = self.linear(x, router.weight, bias=router.bias), router.routing.experts
        ids, weights = reference.route(logits[:, :experts], router.routing, router.choice_bias, router.scale)
        return Routes(ids, weights, reference.sigmoid(logits[:, experts:]) if router.gates_shared else None)

    def experts(
        self, x: Tensor, routes: Routes, mlp: ExpertMLP, add_to: Tensor | None = None, gate: Gate = Gate.SILU
    ) -> Tensor:
        out = torch.zeros_like(x)
        for number in sorted(set(routes.ids.flatten().tolist())):
            rows, choices = (routes.ids == number).nonzero(as_tuple=True)
            output = _mlp(x[rows], mlp.experts[number], gate, mlp.biases, number)
            out[rows] += routes.weights[rows, choices, None] * output
        if mlp.shared:
            shared = _mlp(x, mlp.shared, gate)
            out += shared if routes.shared is None else routes.shared * shared
        return _added(out, add_to)

    def select(self, x: Tensor, batch: Batch) -> Tensor:
        return x[torch.tensor(batch.logit_rows, dtype=torch.int64)]

    def selected(self, batch: Batch) -> Batch:
        return selected_batch(batch)

    def logits(self, x: Tensor, head: QLinear, softcap: float = 0.0) -> Tensor:
        return reference.soft_cap(head.forward(x), softcap)


def _states(batch: Batch, state: LayerState) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states that the requests read and write, the first token of each, and their context lengths."""
    tables, starts, lengths = batch.block_tables[state.group], batch.query_starts, batch.context_lengths
    return torch.tensor(tables), torch.tensor(starts), torch.tensor(lengths)


def _mlp(x: Tensor, mlp: GatedMLP, gate: Gate, biases: ExpertBiases | None = None, expert: int = 0) -> Tensor:
    both = mlp.gate_up.forward(x)
    if biases is None:
        return mlp.down.forward(reference.gated(both, gate))
    return mlp.down.forward(reference.gated(both + biases.gate_up[expert], gate)) + biases.down[expert]


def _added(x: Tensor, to: Tensor | None) -> Tensor:
    return x if to is None else to + x
