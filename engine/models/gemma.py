"""The Gemma families: norms before and after attention and MLP, GELU gates, and windows in most layers
(arXiv:2408.00118).

Gemma 3 adds head norms, and a separate rope for layers with a window (arXiv:2503.19786). Architectures: `gemma2` and
`gemma3`. A config.json with `gemma3` describes a multimodal model, whose decoder is `gemma3_text`.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.model_config import Gate, HeadNorm, ModelConfig, NormPlacement
from engine.models.decoder_config import (
    IGNORED,
    STEMS,
    TEXT_PREFIX,
    all_but_every,
    read_decoder,
    text_metadata,
    with_windows,
)
from engine.models.rope_config import read_local_rope

NAMES = Names(
    STEMS
    | {
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
        "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    IGNORED,
    TEXT_PREFIX,
)

TEXT_DEFAULTS: dict[str, object] = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA3_DEFAULTS = TEXT_DEFAULTS | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
}
DEFAULTS: dict[str, dict[str, object]] = {
    "gemma2": TEXT_DEFAULTS
    | {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "gemma2.final_logit_softcapping": 30.0,
        "gemma2.attn_logit_softcapping": 50.0,
        "gemma2.attention.sliding_window": 4096,
    },
    "gemma3": GEMMA3_DEFAULTS,
    "gemma3_text": GEMMA3_DEFAULTS,
}
ATTENTION_SOFTCAP = Key(Keys.LLM.ATTN_LOGIT_SOFTCAPPING, "attn_logit_softcapping")
LOGIT_SOFTCAP = Key(Keys.LLM.FINAL_LOGIT_SOFTCAPPING, "final_logit_softcapping")
QUERY_SCALAR = Key("", "query_pre_attn_scalar")
# Layer counts of the model sizes that scale queries by hidden / heads instead of head_dim. GGUF files do not store the
# scale.
WIDE_QUERIES = {"gemma2": 46, "gemma3": 62}
LOCAL_BASE = 10_000.0


def _as_float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _as_float16(value: float) -> float:
    return float(struct.unpack("<e", struct.pack("<e", value))[0])


def _as_bfloat16(value: float) -> float:
    """Return the value rounded to bfloat16, to nearest with ties to even."""
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    bits += 0x7FFF + ((bits >> 16) & 1)
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0])


ROUNDED: Mapping[str, Callable[[float], float]] = {
    "bfloat16": _as_bfloat16,
    "float16": _as_float16,
    "float32": _as_float32,
}


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = text_metadata(metadata, DEFAULTS)
    config = read_decoder(metadata, gate=Gate.GELU)
    config = replace(
        config,
        attention_scale=_query_scalar(metadata, config) ** -0.5,
        attention_softcap=metadata.number(ATTENTION_SOFTCAP, 0.0, minimum=0.0, maximum=1e6),
        logit_softcap=metadata.number(LOGIT_SOFTCAP, 0.0, minimum=0.0, maximum=1e6),
        embedding_scale=embedding_scale(metadata, config.hidden),
        norm_placement=NormPlacement.BOTH,
        # In GGUF files the converter has already added the offset.
        norm=replace(config.norm, offset=1.0 if metadata.is_config else 0.0),
    )
    if metadata.architecture == "gemma2":
        return with_windows(metadata, config, all_but_every(2, len(config.layers)))
    local = read_local_rope(metadata, config.attention.head_dim, LOCAL_BASE)
    config = replace(config, ropes=(*config.ropes, local), head_norm=HeadNorm.EACH)
    return with_windows(metadata, config, all_but_every(6, len(config.layers)), local_rope=1)


def _query_scalar(metadata: Metadata, config: ModelConfig) -> float:
    if metadata.is_config:
        return metadata.number(QUERY_SCALAR, minimum=1.0, maximum=1e6)
    wide, mixer = len(config.layers) == WIDE_QUERIES[metadata.architecture], config.attention
    return max(1, config.hidden // mixer.heads) if wide else mixer.head_dim


def embedding_scale(metadata: Metadata, hidden: int) -> float:
    """Return the square root of the hidden size in the precision of the checkpoint's weights, as in training."""
    scale = math.sqrt(hidden)
    if not metadata.is_config:
        return scale
    rounded = metadata.one_of(Key("", "dtype"), ROUNDED, metadata.text(Key("", "torch_dtype"), "float32"))
    return rounded(scale)
