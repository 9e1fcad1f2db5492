"""BERT encoders (arXiv:1810.04805): learned positions, attention in both directions, norms behind attention and MLP.

GGUF files and checkpoints of architecture `bert`: MiniLM, BGE, E5, GTE and others of that shape, and cross-encoders. A
text is of the first token type; of two that are read together, the other one is of the second. Source of the tensors'
names: `blk.N.attn_output_norm` and so on as llama.cpp writes them.
"""

import re
from dataclasses import dataclass
from typing import Self

import torch
from gguf.constants import Keys
from torch import Tensor
from torch.nn import functional as F

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.checkpoints.weights import Weights
from engine.config import EncoderConfig
from engine.errors import UnsupportedModel
from quant.kernels.reference import dequantize
from quant.linear import LinearBackend, QLinear

MAX_CONTEXT = 1 << 15

_LAYER = "encoder.layer.{}"
NAMES = Names(
    {
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "blk.{}.attn_q": f"{_LAYER}.attention.self.query",
        "blk.{}.attn_k": f"{_LAYER}.attention.self.key",
        "blk.{}.attn_v": f"{_LAYER}.attention.self.value",
        "blk.{}.attn_output": f"{_LAYER}.attention.output.dense",
        "blk.{}.attn_output_norm": f"{_LAYER}.attention.output.LayerNorm",
        "blk.{}.ffn_up": f"{_LAYER}.intermediate.dense",
        "blk.{}.ffn_down": f"{_LAYER}.output.dense",
        "blk.{}.layer_output_norm": f"{_LAYER}.output.LayerNorm",
    },
    # The numbers from 0 up, and a layer for classification that embeddings have no use for.
    re.compile(r"embeddings\.position_ids|pooler\.dense\..*"),
    prefix="bert.",
)
RANKING_NAMES = Names(  # of cross-encoders
    {**NAMES.stems, "cls": "pooler.dense", "cls.output": "classifier"},
    re.compile(r"embeddings\.position_ids"),
    prefix="bert.",
)

HIDDEN = Key(Keys.LLM.EMBEDDING_LENGTH, "hidden_size")
HEADS = Key(Keys.Attention.HEAD_COUNT, "num_attention_heads")
VOCABULARY = Key(Keys.LLM.VOCAB_SIZE, "vocab_size")
TOKENS = Key(Keys.Tokenizer.LIST)
EPSILON = Key(Keys.Attention.LAYERNORM_EPS, "layer_norm_eps")


def read_config(metadata: Metadata) -> EncoderConfig:
    """What is absent has the default that the format gives it. Raises UnsupportedModel for an odd value, by name."""
    metadata.refuse(Key(Keys.Attention.CAUSAL, "is_decoder"), False)
    metadata.refuse(Key("", "position_embedding_type"), "absolute")
    metadata.refuse(Key("", "hidden_act"), "gelu")
    hidden, heads = metadata.integer(HIDDEN), metadata.integer(HEADS)
    if hidden % heads:
        raise UnsupportedModel(f"{heads} attention heads do not divide a hidden size of {hidden}")
    tokens = metadata.get(TOKENS)
    return EncoderConfig(
        layers=metadata.integer(Key(Keys.LLM.BLOCK_COUNT, "num_hidden_layers"), most=1024),
        hidden=hidden,
        heads=heads,
        mlp_hidden=metadata.integer(Key(Keys.LLM.FEED_FORWARD_LENGTH, "intermediate_size")),
        vocab_size=metadata.integer(VOCABULARY, len(tokens) if isinstance(tokens, tuple) else None, most=1 << 22),
        context_length=metadata.integer(Key(Keys.LLM.CONTEXT_LENGTH, "max_position_embeddings"), most=MAX_CONTEXT),
        token_types=metadata.integer(Key(Keys.Tokenizer.TOKEN_TYPE_COUNT, "type_vocab_size"), 2, most=1024),
        norm_epsilon=metadata.number(EPSILON, 1e-12, least=1e-20, most=0.1),
    )


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer normalization (arXiv:1607.06450): weight and bias, float32 [hidden]."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layers side by side, and their biases, float32 [outputs]."""

    weight: QLinear
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.forward(x) + self.bias


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, and what it computes."""

    heads: int
    qkv: Projection  # q, k and v side by side
    attention_out: Projection
    attention_norm: Norm
    up: Projection
    down: Projection
    mlp_norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [tokens, hidden] -> the same shape."""
        x = self.attention_norm(x + self.attention_out(self._attend(x)))
        return self.mlp_norm(x + self.down(F.gelu(self.up(x))))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3).unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(x.shape)


class Model:
    """A loaded BERT encoder. See `engine.embedding.encoder.EncoderModel` for the contract."""

    def __init__(
        self,
        config: EncoderConfig,
        embedding: QLinear,
        positions: Tensor,
        second: Tensor,
        norm: Norm,
        layers: tuple[Layer, ...],
    ) -> None:
        """`positions` float32 [context, hidden]: what is added at each, with the row of the first token type in it;
        `second` float32 [hidden]: what tokens of the second type have beside that."""
        self._second = second
        self.config = config
        self._embedding = embedding
        self._positions = positions
        self._norm = norm
        self._layers = layers

    @classmethod
    def load(cls, config: EncoderConfig, weights: Weights, backend: LinearBackend) -> Self:
        loader = _Loader(config, weights, backend)
        embedding = backend.linear([weights.take("token_embd.weight", config.vocab_size, config.hidden)])
        types = loader.table("token_types", config.token_types)
        positions = backend.to_device(loader.table("position_embd", config.context_length) + types[0])
        second = backend.to_device(types[min(1, config.token_types - 1)] - types[0])
        layers = weights.together(loader.layer, range(config.layers))
        return cls(config, embedding, positions, second, loader.norm("token_embd_norm"), tuple(layers))

    def forward(self, ids: Tensor, second: int | None = None) -> Tensor:
        x = self._embedding.rows(ids.to(self._positions.device)) + self._positions[: len(ids)]
        if second is not None:
            x[second:] += self._second
        x = self._norm(x)
        for layer in self._layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class RankingHead:
    """From the states of two texts to how well the second suits the first: transformers' sequence classification with
    one label, whose probability it is."""

    dense: Tensor  # float32 [hidden, hidden], and its bias, [hidden]
    dense_bias: Tensor
    out: Tensor  # float32 [1, hidden], and its bias, [1]
    out_bias: Tensor

    @classmethod
    def load(cls, config: EncoderConfig, weights: Weights, backend: LinearBackend) -> Self:
        hidden = config.hidden
        return cls(
            backend.to_device(dequantize(weights.take("cls.weight", hidden, hidden))),
            backend.to_device(weights.take_vector("cls.bias", hidden)),
            backend.to_device(dequantize(weights.take("cls.output.weight", 1, hidden))),
            backend.to_device(weights.take_vector("cls.output.bias", 1)),
        )

    def __call__(self, states: Tensor) -> Tensor:
        """float32 [tokens, hidden] -> float32 [1], a logit."""
        state = F.linear(states[0], self.dense, self.dense_bias).tanh()
        return F.linear(state, self.out, self.out_bias)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Takes every weight by its name."""

    config: EncoderConfig
    weights: Weights
    backend: LinearBackend

    def table(self, name: str, rows: int) -> Tensor:
        return dequantize(self.weights.take(f"{name}.weight", rows, self.config.hidden))

    def norm(self, name: str) -> Norm:
        weight, bias = (self.weights.take_vector(f"{name}.{part}", self.config.hidden) for part in ("weight", "bias"))
        return Norm(self.backend.to_device(weight), self.backend.to_device(bias), self.config.norm_epsilon)

    def projection(self, inputs: int, outputs: int, *names: str) -> Projection:
        """Layers of equal width."""
        weights = [self.weights.take(f"{name}.weight", outputs, inputs) for name in names]
        biases = [self.weights.take_vector(f"{name}.bias", outputs) for name in names]
        return Projection(self.backend.linear(weights), self.backend.to_device(torch.cat(biases)))

    def layer(self, number: int) -> Layer:
        hidden, mlp, prefix = self.config.hidden, self.config.mlp_hidden, f"blk.{number}."
        return Layer(
            heads=self.config.heads,
            qkv=self.projection(hidden, hidden, *(f"{prefix}attn_{letter}" for letter in "qkv")),
            attention_out=self.projection(hidden, hidden, f"{prefix}attn_output"),
            attention_norm=self.norm(f"{prefix}attn_output_norm"),
            up=self.projection(hidden, mlp, f"{prefix}ffn_up"),
            down=self.projection(mlp, hidden, f"{prefix}ffn_down"),
            mlp_norm=self.norm(f"{prefix}layer_output_norm"),
        )
