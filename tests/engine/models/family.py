"""The description of a tiny model of a family, and what GGUF files of several families state in the same way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf import GGUFWriter
from torch import Tensor
from transformers import PreTrainedConfig

VOCABULARY = 97
CONTEXT = 512
ORIGINAL = 64  # original context length of models with scaled ropes
WINDOW = 24
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
Write = Callable[[GGUFWriter, PreTrainedConfig], None]
Tensors = Callable[[PreTrainedConfig], Mapping[str, Tensor]]


def nothing(_writer: GGUFWriter, _config: PreTrainedConfig) -> None:
    pass


def head_dim(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def granite(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def no_tensors(_config: PreTrainedConfig) -> Mapping[str, Tensor]:
    return {}


@dataclass(frozen=True)
class GGUFForm:
    """The GGUF metadata and tensors that llama.cpp's converter writes for a family."""

    arch: str
    write: Write = nothing
    tensors: Tensors = no_tensors
    interleaved_rows: bool = False  # reorder the rows of q and k, so that rotary pairs are adjacent
    norm_offset: float = 0.0  # added to norm weights
    layer_norm: bool = False  # layer norms instead of RMS norms


@dataclass(frozen=True)
class Family:
    """One configuration of a family, and its metadata and tensors in GGUF if the converter supports it."""

    config: type[PreTrainedConfig]
    options: Mapping[str, Any] = field(default_factory=dict)
    gguf: GGUFForm | None = None
    norm: float = 1.0  # mean of the random norm weights


def full_rope(config: PreTrainedConfig) -> dict[str, float]:
    """Return the rope parameters of layers without a window."""
    rope: dict[str, dict[str, float]] = config.rope_parameters
    return rope.get("full_attention", rope)  # type: ignore[arg-type]


def head_size(config: PreTrainedConfig) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def rotary_dimensions(config: PreTrainedConfig) -> int:
    return int(head_size(config) * full_rope(config).get("partial_rotary_factor", 1.0))
