"""BERT encoders (arXiv:1810.04805): learned positions, bidirectional attention, norms after attention and after the
MLP.

Covers architecture `bert`, in GGUF files and transformers checkpoints: MiniLM, BGE, E5, GTE, and others, including
cross-encoders. A single text has the first token type; the second text of a pair has the second. Tensor names such as
`blk.N.attn_output_norm` are those of llama.cpp.
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
from engine.errors import UnsupportedModel
from engine.model_config import EncoderConfig
from engine.models.decoder_config import vocabulary_size
from quant.kernels.reference import dequantize
from quant.linear import LinearBackend, QLinear, Use

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
    # Position ids are always 0, 1, 2, and so on. The pooler is for classification, and embeddings do not use it.
    re.compile(r"embeddings\.position_ids|pooler\.dense\..*"),
    prefix="bert.",
)
RANKING_NAMES = Names(  # tensor names of cross-encoders
    {**NAMES.stems, "cls": "pooler.dense", "cls.output": "classifier"},
    re.compile(r"embeddings\.position_ids"),
    prefix="bert.",
)

HIDDEN = Key(Keys.LLM.EMBEDDING_LENGTH, "hidden_size")
HEADS = Key(Keys.Attention.HEAD_COUNT, "num_attention_heads")
EPSILON = Key(Keys.Attention.LAYERNORM_EPS, "layer_norm_eps")


def read_config(metadata: Metadata) -> EncoderConfig:
    """Return the configuration. Missing values get the defaults of transformers.

    Raises UnsupportedModel, which names the unsupported value.
    """
    metadata.require(Key(Keys.Attention.CAUSAL, "is_decoder"), False)
    metadata.require(Key("", "position_embedding_type"), "absolute")
    metadata.require(Key("", "hidden_act"), "gelu")
    hidden, heads = metadata.integer(HIDDEN), metadata.integer(HEADS)
    if hidden % heads:
        raise UnsupportedModel(f"{heads} attention heads do not divide a hidden size of {hidden}")
    return EncoderConfig(
        layers=metadata.integer(Key(Keys.LLM.BLOCK_COUNT, "num_hidden_layers"), maximum=1024),
        hidden=hidden,
        heads=heads,
        mlp_hidden=metadata.integer(Key(Keys.LLM.FEED_FORWARD_LENGTH, "intermediate_size")),
        vocab_size=vocabulary_size(metadata),
        context_length=metadata.integer(Key(Keys.LLM.CONTEXT_LENGTH, "max_position_embeddings"), maximum=MAX_CONTEXT),
        token_types=metadata.integer(Key(Keys.Tokenizer.TOKEN_TYPE_COUNT, "type_vocab_size"), 2, maximum=1024),
        norm_epsilon=metadata.number(EPSILON, 1e-12, minimum=1e-20, maximum=0.1),
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
    """Linear layers that share an input, computed as one, with their biases, float32 [outputs]."""

    weight: QLinear
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.forward(x) + self.bias


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, and the computation with them."""

    heads: int
    qkv: Projection  # q, k, and v as one projection
    attention_out: Projection
    attention_norm: Norm
    up: Projection
    down: Projection
    mlp_norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer: float32 [tokens, hidden] -> the same shape."""
        x = self.attention_norm(x + self.attention_out(self._attend(x)))
        return self.mlp_norm(x + self.down(F.gelu(self.up(x))))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3).unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(x.shape)


class Model:
    """A loaded BERT encoder. Implements `engine.embedding.encoder.EncoderModel`."""

    def __init__(
        self,
        config: EncoderConfig,
        embedding: QLinear,
        positions: Tensor,
        second_type: Tensor,
        norm: Norm,
        layers: tuple[Layer, ...],
    ) -> None:
        """Create the model from its weights.

        `positions`, float32 [context, hidden], are the position embeddings plus the embedding of the first token type.
        `second_type`, float32 [hidden], is the embedding of the second token type minus that of the first.
        """
        self._second_type = second_type
        self.config = config
        self._embedding = embedding
        self._positions = positions
        self._norm = norm
        self._layers = layers

    @classmethod
    def load(cls, config: EncoderConfig, weights: Weights, backend: LinearBackend) -> Self:
        loader = _Loader(config, weights, backend)
        [embedding] = weights.load_parallel(loader.embedding, ["token_embd.weight"])
        types = loader.table("token_types", config.token_types)
        positions = backend.to_device(loader.table("position_embd", config.context_length) + types[0])
        second_type = backend.to_device(types[min(1, config.token_types - 1)] - types[0])
        layers = weights.load_parallel(loader.layer, range(config.layers))
        return cls(config, embedding, positions, second_type, loader.norm("token_embd_norm"), tuple(layers))

    def forward(self, ids: Tensor, second_start: int | None = None) -> Tensor:
        x = self._embedding.rows(ids.to(self._positions.device)) + self._positions[: len(ids)]
        if second_start is not None:
            x[second_start:] += self._second_type
        x = self._norm(x)
        for layer in self._layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class RankingHead:
    """Computes how relevant the second text is to the first, from the states of both.

    It is the sequence classification head of transformers with one label; the result is the label's logit.
    """

    dense: Tensor  # float32 [hidden, hidden]; with a bias [hidden]
    dense_bias: Tensor
    out: Tensor  # float32 [1, hidden]; with a bias [1]
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
        """Return the logit, float32 [1], for the states of both texts, float32 [tokens, hidden]."""
        state = F.linear(states[0], self.dense, self.dense_bias).tanh()
        return F.linear(state, self.out, self.out_bias)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads the parts of the model, taking weights by name."""

    config: EncoderConfig
    weights: Weights
    backend: LinearBackend

    def table(self, name: str, rows: int) -> Tensor:
        return dequantize(self.weights.take(f"{name}.weight", rows, self.config.hidden))

    def embedding(self, name: str) -> QLinear:
        return self.backend.linear([self.weights.take(name, self.config.vocab_size, self.config.hidden)], Use.ROWS)

    def norm(self, name: str) -> Norm:
        weight, bias = (self.weights.take_vector(f"{name}.{part}", self.config.hidden) for part in ("weight", "bias"))
        return Norm(self.backend.to_device(weight), self.backend.to_device(bias), self.config.norm_epsilon)

    def projection(self, inputs: int, outputs: int, *names: str) -> Projection:
        """Load layers of equal output width as one projection."""
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
