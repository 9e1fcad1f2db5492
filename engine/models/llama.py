"""The Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU (arXiv:2307.09288, arXiv:2407.21783).

GGUF files of architecture `llama`: Llama 2 and 3, SmolLM2, Mistral 7B, TinyLlama and other checkpoints of that shape.
Their rotary pairs are neighbours: the converter reorders the rows of q and k.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from engine.batch import Batch
from engine.checkpoint_config import Metadata
from engine.config import ModelConfig, RopeConfig
from engine.errors import UnsupportedModel
from engine.kv_cache import KVCache, KVGroup
from engine.operations import Activation, Operations
from engine.rope import RotaryTable, rotary_table
from engine.weights import GGUFWeights
from quant.linear import QLinear

MAX_CONTEXT = 1 << 24


def read_config(metadata: Metadata) -> ModelConfig:
    """From GGUF metadata; what is absent has the default that the format gives it."""
    hidden = metadata.integer("{arch}.embedding_length")
    heads = metadata.integer("{arch}.attention.head_count")
    kv_heads = metadata.integer("{arch}.attention.head_count_kv", heads)
    head_dim = metadata.integer("{arch}.attention.key_length", max(1, hidden // heads), most=1024)
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} attention heads do not share {kv_heads} KV heads evenly")
    if head_dim % 2:
        raise UnsupportedModel(f"A head dimension of {head_dim} is odd, and rotary embedding needs pairs")
    metadata.refuse("{arch}.attention.value_length", head_dim)
    metadata.refuse("{arch}.rope.dimension_count", head_dim)
    metadata.refuse("{arch}.rope.scaling.type", "none", "linear")
    scaled = metadata.values.get(f"{metadata.architecture}.rope.scaling.type") != "none"
    metadata.refuse("{arch}.expert_count", 0)
    return ModelConfig(
        architecture=metadata.architecture,
        layers=metadata.integer("{arch}.block_count", most=1024),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_hidden=metadata.integer("{arch}.feed_forward_length"),
        vocab_size=metadata.integer("{arch}.vocab_size", _vocabulary(metadata), most=1 << 22),
        context_length=metadata.integer("{arch}.context_length", most=MAX_CONTEXT),
        norm_epsilon=metadata.number("{arch}.attention.layer_norm_rms_epsilon", least=0.0, most=0.1),
        rope=RopeConfig(
            base=metadata.number("{arch}.rope.freq_base", 10_000.0, least=1.0, most=1e12),
            dimensions=head_dim,
            interleaved=True,
            linear_factor=metadata.number("{arch}.rope.scaling.factor", 1.0, least=1.0, most=1024.0) if scaled else 1.0,
        ),
    )


def _vocabulary(metadata: Metadata) -> int | None:
    tokens = metadata.values.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, tuple) else None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights."""

    attention_norm: Tensor  # float32 [hidden]
    qkv: QLinear  # q, k and v side by side
    attention_out: QLinear
    mlp_norm: Tensor  # float32 [hidden]
    gate_up: QLinear  # gate and up side by side
    down: QLinear

    @classmethod
    def load(cls, config: ModelConfig, weights: GGUFWeights, operations: Operations, number: int) -> Self:
        hidden, mlp = config.hidden, config.mlp_hidden
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        prefix = f"blk.{number}."

        def linear(inputs: int, **outputs: int) -> QLinear:
            return operations.weights.linear(
                [weights.take(f"{prefix}{n}.weight", w, inputs) for n, w in outputs.items()]
            )

        return cls(
            attention_norm=weights.take_vector(f"{prefix}attn_norm.weight", hidden),
            qkv=linear(hidden, attn_q=q_width, attn_k=kv_width, attn_v=kv_width),
            attention_out=linear(q_width, attn_output=hidden),
            mlp_norm=weights.take_vector(f"{prefix}ffn_norm.weight", hidden),
            gate_up=linear(hidden, ffn_gate=mlp, ffn_up=mlp),
            down=linear(mlp, ffn_down=hidden),
        )


class Model:
    """A loaded Llama-family decoder. See `engine.models.Model` for the contract."""

    def __init__(
        self,
        config: ModelConfig,
        operations: Operations,
        rotary: RotaryTable,
        embedding: QLinear,
        layers: tuple[Layer, ...],
        output_norm: Tensor,
        head: QLinear,
    ) -> None:
        self.config = config
        self._ops = operations
        self._rotary = rotary
        self._embedding = embedding
        self._layers = layers
        self._output_norm = output_norm
        self._head = head

    @classmethod
    def load(cls, config: ModelConfig, weights: GGUFWeights, operations: Operations, context_length: int) -> Self:
        def table(name: str) -> QLinear:
            return operations.weights.linear([weights.take(name, config.vocab_size, config.hidden)])

        pairs, factors = config.rope.dimensions // 2, None
        if "rope_freqs.weight" in weights:  # how GGUF stores Llama 3.1's scaling
            factors = weights.take_vector("rope_freqs.weight", pairs)
        names = ["token_embd.weight", *["output.weight"] * ("output.weight" in weights)]
        tables = weights.together(table, names)
        layers = weights.together(lambda number: Layer.load(config, weights, operations, number), range(config.layers))
        return cls(
            config,
            operations,
            rotary_table(config.rope, factors, context_length),
            tables[0],
            tuple(layers),
            weights.take_vector("output_norm.weight", config.hidden),
            tables[-1],  # the embedding again where the head is tied to it
        )

    def kv_groups(self) -> tuple[KVGroup, ...]:
        return (KVGroup(tuple(range(self.config.layers)), self.config.kv_heads, self.config.head_dim),)

    def forward(self, batch: Batch, kv: KVCache) -> Activation:
        ops, epsilon = self._ops, self.config.norm_epsilon
        x = ops.embed(batch, self._embedding)
        for number, layer in enumerate(self._layers):
            cache = kv.layer(number)
            normed = ops.norm(x, layer.attention_norm, epsilon)
            q = ops.rope_and_store(ops.linear(normed, layer.qkv), batch, cache, self._rotary)
            attended = ops.attend(q, batch, cache)
            if layer is self._layers[-1]:  # all that other tokens still do for anyone is done: their keys and values
                attended, x = ops.select(attended, batch), ops.select(x, batch)
            x = ops.linear(attended, layer.attention_out, add_to=x)
            normed = ops.norm(x, layer.mlp_norm, epsilon)
            x = ops.gated_mlp(normed, layer.gate_up, layer.down, add_to=x)
        return ops.logits(ops.norm(x, self._output_norm, epsilon), self._head)
