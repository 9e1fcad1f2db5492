"""Qwen 3.5 to 3.8: gated delta rules in most layers (arXiv:2412.06464), and gated attention in the others.

Architectures: `qwen3_5` in transformers checkpoints, also as the text part of a multimodal model, and `qwen35` in GGUF
files; with experts `qwen3_5_moe` and `qwen35moe`.
"""

from collections.abc import Mapping
from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.errors import UnsupportedModel
from engine.mixer_config import AttentionConfig, DeltaConfig
from engine.model_config import ExpertConfig, HeadNorm, ModelConfig
from engine.models.decoder_config import (
    LAYER_TYPES,
    LAYERS,
    MLP_HIDDEN,
    TEXT_PREFIX,
    read_decoder,
    recurrent_layers,
    text_metadata,
    without_drafts,
)
from engine.models.expert_config import read_experts, with_experts
from engine.models.qwen import EXPERTS
from engine.models.qwen import NAMES as QWEN

MIXER = "model.layers.{}.linear_attn."
NAMES = Names(
    dict(QWEN.stems)
    | {
        "blk.{}.attn_qkv": f"{MIXER}in_proj_qkv",
        "blk.{}.attn_gate": f"{MIXER}in_proj_z",
        "blk.{}.ssm_beta": f"{MIXER}in_proj_b",
        "blk.{}.ssm_alpha": f"{MIXER}in_proj_a",
        "blk.{}.ssm_conv1d": f"{MIXER}conv1d",
        "blk.{}.ssm_norm": f"{MIXER}norm",
        "blk.{}.ssm_out": f"{MIXER}out_proj",
    },
    QWEN.ignored,
    prefix=TEXT_PREFIX,
    whole=dict(QWEN.whole) | {f"{MIXER}A_log": "blk.{}.ssm_a_log.weight", f"{MIXER}dt_bias": "blk.{}.ssm_dt.bias"},
)
_SHARED: dict[str, object] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MOE: dict[str, object] = _SHARED | {
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "qwen3_5": _SHARED,
    "qwen3_5_text": _SHARED,
    "qwen3_5_moe": MOE,
    "qwen3_5_moe_text": MOE,
    "qwen35": {},
    "qwen35moe": {},
}
LINEAR = "linear_attention"
RECURRENT_LAYERS = Key("{arch}.attention.recurrent_layers", "")
INTERVAL = Key("{arch}.full_attention_interval", "full_attention_interval")
KEY_HEADS = Key(Keys.SSM.GROUP_COUNT, "linear_num_key_heads")
VALUE_HEADS = Key(Keys.SSM.TIME_STEP_RANK, "linear_num_value_heads")
KEY_DIM = Key(Keys.SSM.STATE_SIZE, "linear_key_head_dim")
VALUE_DIM = Key("", "linear_value_head_dim")
INNER = Key(Keys.SSM.INNER_SIZE, "")
TAPS = Key(Keys.SSM.CONV_KERNEL, "linear_conv_kernel_dim")
EXPERT_HIDDEN = Key(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, "moe_intermediate_size")
DRAFT_LAYERS = Key(Keys.LLM.NEXTN_PREDICT_LAYERS, "")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = text_metadata(metadata, DEFAULTS)
    tiled, has_experts = not metadata.is_config, "moe" in metadata.architecture
    if has_experts and metadata.get(MLP_HIDDEN) is None:  # no layer has a dense MLP
        width = metadata.integer(EXPERT_HIDDEN)
        metadata = replace(metadata, values={**metadata.values, metadata.name(MLP_HIDDEN): width})
    config = read_hybrid(metadata, experts=has_experts, tiled=tiled)
    return with_experts(config, read_gated_experts(metadata, config)) if has_experts else config


def read_hybrid(metadata: Metadata, *, experts: bool, tiled: bool) -> ModelConfig:
    """Return the configuration with the mixers of all layers, but without experts.

    `experts`: whether the architecture has them. `tiled`: see `DeltaConfig`. Raises UnsupportedModel.
    """
    recurrent = _recurrent_layers(metadata)
    config = read_decoder(metadata, partial_rotary=True, experts=experts)
    attention, delta = replace(config.attention, gated=True), _delta(metadata, tiled=tiled)
    layers = tuple(
        replace(layer, mixer=delta if it else attention) for layer, it in zip(config.layers, recurrent, strict=True)
    )
    config = replace(
        config,
        layers=layers,
        head_norm=HeadNorm.EACH,
        qkv_bias=False,
        out_bias=False,
        # In GGUF files the converter has already added the offset.
        norm=replace(config.norm, offset=1.0 if metadata.is_config else 0.0),
    )
    config = without_drafts(metadata, config, DRAFT_LAYERS)
    if not any(isinstance(layer.mixer, AttentionConfig) for layer in config.layers):
        raise UnsupportedModel("The model has no attention layer")
    return config


def read_gated_experts(metadata: Metadata, config: ModelConfig) -> ExpertConfig:
    """Return the experts of a layer, with a gate if there is a shared MLP. Raises UnsupportedModel."""
    experts = read_experts(metadata, config, EXPERTS)
    return replace(experts, shared_gate=bool(experts.shared_hidden))


def _recurrent_layers(metadata: Metadata) -> list[bool]:
    """Return for each layer whether it has a delta rule."""
    layers = metadata.integer(LAYERS, maximum=1024)
    is_config = metadata.is_config
    listed = recurrent_layers(metadata, LINEAR) if is_config else metadata.items(RECURRENT_LAYERS, bool)
    if listed is None:
        interval = metadata.integer(INTERVAL, 4)
        return [(number + 1) % interval != 0 for number in range(layers)]
    if len(listed) != layers:
        key = LAYER_TYPES if is_config else RECURRENT_LAYERS
        raise UnsupportedModel(f"{metadata.name(key)} has {len(listed)} values for {layers} layers")
    return list(listed)


def _delta(metadata: Metadata, *, tiled: bool) -> DeltaConfig:
    key_heads, value_heads = (metadata.integer(key, maximum=1024) for key in (KEY_HEADS, VALUE_HEADS))
    key_dim = metadata.integer(KEY_DIM, maximum=1024)
    if value_heads % key_heads:
        raise UnsupportedModel(f"{value_heads} value heads do not share {key_heads} key heads evenly")
    if metadata.is_config:
        value_dim = metadata.integer(VALUE_DIM, maximum=1024)
    else:
        value_dim, rest = divmod(metadata.integer(INNER), value_heads)
        if rest or not value_dim:
            raise UnsupportedModel(f"{metadata.name(INNER)} is not a multiple of the {value_heads} value heads")
    taps = metadata.integer(TAPS, minimum=2, maximum=16)
    return DeltaConfig(key_heads, value_heads, key_dim, value_dim, taps, tiled)
