"""Gemma 4: layers with and without a window that have heads of different sizes, and norms of q, k, and v.

Small models have embeddings of each token for every layer, and their last layers attend to the keys and values of
earlier ones. Others use the keys as values, or have a mixture of experts beside each MLP. Architectures: `gemma4` in
GGUF files; in a config.json, `gemma4` describes a multimodal model, whose decoder is `gemma4_text`.
"""

from dataclasses import replace
from functools import partial

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.errors import UnsupportedModel
from engine.mixer_config import AttentionConfig
from engine.model_config import Gate, HeadNorm, LayerConfig, MLPConfig, ModelConfig, NormPlacement
from engine.models import gemma
from engine.models.decoder_config import (
    HEAD_DIM,
    IGNORED,
    KV_HEADS,
    LAYERS,
    MLP_HIDDEN,
    VALUE_DIM,
    all_but_every,
    read_decoder,
    text_metadata,
    with_windows,
)
from engine.models.expert_config import STACKED, ExpertKeys, read_experts, with_experts
from engine.models.rope_config import DIMENSIONS, SECTIONS, read_local_rope, read_proportional_rope

LAYER = "model.layers.{}."
NAMES = Names(
    {
        **gemma.NAMES.stems,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "blk.{}.inp_gate": f"{LAYER}per_layer_input_gate",
        "blk.{}.proj": f"{LAYER}per_layer_projection",
        "blk.{}.post_norm": f"{LAYER}post_per_layer_input_norm",
        "blk.{}.ffn_gate_inp": f"{LAYER}router.proj",
        "blk.{}.pre_ffw_norm_2": f"{LAYER}pre_feedforward_layernorm_2",
        "blk.{}.post_ffw_norm_1": f"{LAYER}post_feedforward_layernorm_1",
        "blk.{}.post_ffw_norm_2": f"{LAYER}post_feedforward_layernorm_2",
    },
    IGNORED,
    gemma.NAMES.prefix,
    whole={
        f"{LAYER}layer_scalar": "blk.{}.layer_output_scale.weight",
        f"{LAYER}router.scale": "blk.{}.ffn_gate_inp.scale",
        f"{LAYER}router.per_expert_scale": "blk.{}.ffn_down_exps.scale",
    }
    | {theirs.replace("mlp.experts", "experts"): ours for theirs, ours in STACKED.items()},
)
TEXT_DEFAULTS: dict[str, object] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
}
DEFAULTS: dict[str, dict[str, object]] = {"gemma4": TEXT_DEFAULTS, "gemma4_text": TEXT_DEFAULTS}
LOCAL_BASE = 10_000.0
LOCAL_ROPE = 1  # index of the rope of layers with a window
LOCAL_HEAD_DIM = Key(Keys.Attention.KEY_LENGTH_SWA, "head_dim")
LOCAL_VALUE_DIM = Key(Keys.Attention.VALUE_LENGTH_SWA, "")
GLOBAL_HEAD_DIM = Key(Keys.Attention.KEY_LENGTH, "global_head_dim")
GLOBAL_KV_HEADS = Key("", "num_global_key_value_heads")
CHANGED_LAYERS = Key("", "per_layer_config")  # newer name of the two keys before, for each layer without a window
VALUES_ARE_KEYS = Key("", "attention_k_eq_v")
SHARED_LAYERS = Key(Keys.Attention.SHARED_KV_LAYERS, "num_kv_shared_layers")
DOUBLE_WIDE = Key("", "use_double_wide_mlp")
PER_LAYER = Key(Keys.LLM.EMBD_LENGTH_PER_LAYER_INP, "hidden_size_per_layer_input")
HAS_EXPERTS = Key("", "enable_moe_block")
EXPERT_COUNT = Key(Keys.LLM.EXPERT_COUNT, "")
BIDIRECTIONAL = Key("", "use_bidirectional_attention")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = text_metadata(metadata, DEFAULTS)
    metadata.require(BIDIRECTIONAL, "vision")  # attention to later tokens, for images only
    config = read_decoder(_of_local_layers(metadata), gate=Gate.GELU, experts=True)
    config = replace(
        config,
        attention_scale=1.0,
        logit_softcap=metadata.number(gemma.LOGIT_SOFTCAP, 0.0, minimum=0.0, maximum=1e6),
        embedding_scale=gemma.embedding_scale(metadata, config.hidden),
        norm_placement=NormPlacement.BOTH,
        head_norm=HeadNorm.EACH,
        value_norm=True,
        per_layer=metadata.integer(PER_LAYER, 0, minimum=0),
        scaled_layers=True,
    )
    config = with_windows(metadata, config, all_but_every(6, len(config.layers)), local_rope=LOCAL_ROPE)
    return _with_experts(metadata, _with_shared_layers(metadata, _with_global_heads(metadata, config)))


def _of_local_layers(metadata: Metadata) -> Metadata:
    """Return metadata that `read_decoder` understands: that of layers with a window, without ropes."""
    dropped = {*SECTIONS, BIDIRECTIONAL.config, metadata.name(DIMENSIONS)}
    values = {name: value for name, value in metadata.values.items() if name not in dropped}
    if not metadata.is_config:
        for key, local in ((HEAD_DIM, LOCAL_HEAD_DIM), (VALUE_DIM, LOCAL_VALUE_DIM)):
            values[metadata.name(key)] = metadata.integer(local, maximum=1024)
        for key in (KV_HEADS, MLP_HIDDEN):
            values[metadata.name(key)] = _of_layers(metadata, key)[0]
    return replace(metadata, values=values)


def _of_layers(metadata: Metadata, key: Key) -> list[int]:
    """Return the value of each layer. A GGUF file has one for all layers, or a list."""
    count, values = metadata.integer(LAYERS, maximum=1024), metadata.get(key)
    if not isinstance(values, tuple):
        return [metadata.integer(key)] * count
    if len(values) != count:
        raise UnsupportedModel(f"{metadata.name(key)} has {len(values)} values for {count} layers")
    return [replace(metadata, values={metadata.name(key): value}).integer(key) for value in values]


def _is_local(layer: LayerConfig) -> bool:
    return isinstance(layer.mixer, AttentionConfig) and layer.mixer.rope == LOCAL_ROPE


def _with_global_heads(metadata: Metadata, config: ModelConfig) -> ModelConfig:
    """Set the heads of layers without a window, and both ropes."""
    local = config.attention.cache
    tied = metadata.flag(VALUES_ARE_KEYS, False) if metadata.is_config else None
    if metadata.is_config:
        metadata = _with_global_keys(metadata)
        of_all = metadata.integer(GLOBAL_KV_HEADS, local.kv_heads) if tied else local.kv_heads
        kv_heads = [of_all] * len(config.layers)
    else:
        kv_heads = _of_layers(metadata, KV_HEADS)
    head_dim = metadata.integer(GLOBAL_HEAD_DIM, maximum=1024)
    ropes = read_proportional_rope(metadata, head_dim), read_local_rope(metadata, local.head_dim, LOCAL_BASE)

    def change(attention: AttentionConfig, kv_heads: int) -> AttentionConfig:
        if attention.rope == LOCAL_ROPE:
            return attention
        if attention.heads % kv_heads:
            raise UnsupportedModel(f"{attention.heads} attention heads do not share {kv_heads} KV heads evenly")
        cache = replace(attention.cache, kv_heads=kv_heads, head_dim=head_dim)
        return replace(attention, cache=cache, values_are_keys=tied)

    numbered = zip(config.layers, kv_heads, strict=True)
    layers = tuple(layer.with_attention(partial(change, kv_heads=heads)) for layer, heads in numbered)
    return replace(config, ropes=ropes, layers=layers)


def _with_global_keys(metadata: Metadata) -> Metadata:
    """Return the metadata of a config.json with the keys for layers without a window, if it lists them by layer."""
    listed = metadata.get(CHANGED_LAYERS)
    layers = list(listed.values()) if isinstance(listed, dict) else []
    if not layers or not isinstance(changed := layers[0], dict):
        return metadata
    names = {HEAD_DIM.config: GLOBAL_HEAD_DIM.config, KV_HEADS.config: GLOBAL_KV_HEADS.config}
    given = {names[name]: value for name, value in changed.items() if name in names}
    if len(given) < len(changed) or any(it != changed for it in layers):
        raise UnsupportedModel(f"{CHANGED_LAYERS.config} has layers that differ in more than their heads")
    return replace(metadata, values={**metadata.values, **given})


def _with_shared_layers(metadata: Metadata, config: ModelConfig) -> ModelConfig:
    """Let the last layers use the keys and values of the last one before them that is of the same kind.

    Their MLPs may be wider.
    """
    count = len(config.layers)
    first = count - metadata.integer(SHARED_LAYERS, 0, minimum=0, maximum=count - 1)
    widths = [layer.mlp.active_columns for layer in config.layers]
    if not metadata.is_config:
        widths = _of_layers(metadata, MLP_HIDDEN)
    elif metadata.flag(DOUBLE_WIDE, False):
        widths = [width * (1 if number < first else 2) for number, width in enumerate(widths)]
    sources = {_is_local(layer): number for number, layer in enumerate(config.layers[:first])}
    layers = list(config.layers)
    for number, layer in enumerate(config.layers[first:], first):
        if (source := sources.get(_is_local(layer))) is None:
            raise UnsupportedModel(f"No layer before number {first} has keys and values for layer {number}")
        layers[number] = layer.with_attention(partial(replace, source=source, values_are_keys=False))
    pairs = zip(layers, widths, strict=True)
    return replace(config, layers=tuple(replace(layer, mlp=MLPConfig(width)) for layer, width in pairs))


def _with_experts(metadata: Metadata, config: ModelConfig) -> ModelConfig:
    has_experts = metadata.flag(HAS_EXPERTS, False) if metadata.is_config else metadata.get(EXPERT_COUNT)
    if not has_experts:
        return config
    (width,) = config.mlp_widths
    experts = read_experts(metadata, config, ExpertKeys(active="top_k_experts", hidden="moe_intermediate_size"))
    return with_experts(config, replace(experts, shared_hidden=width, separate=True))
