"""The LFM2 family: short convolutions in most layers, and attention in the others (arXiv:2511.23404).

`lfm2moe` (`lfm2_moe` in transformers) also has experts, with routing by sigmoids and a bias. Its first layers have
dense MLPs.
"""

from collections.abc import Mapping
from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.errors import UnsupportedModel
from engine.mixer_config import ConvConfig
from engine.model_config import HeadNorm, LayerConfig, MLPConfig, ModelConfig, Score
from engine.models.decoder_config import (
    IGNORED,
    KV_HEADS,
    LAYER_TYPES,
    LAYERS,
    MLP_HIDDEN,
    read_decoder,
    recurrent_layers,
)
from engine.models.expert_config import ExpertKeys, read_experts, with_experts

_LAYER = "model.layers.{}."
_FEED, _EXPERTS = f"{_LAYER}feed_forward", f"{_LAYER}feed_forward.experts"
_PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}
NAMES = Names(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.embedding_norm",
        "output": "lm_head",
        "blk.{}.attn_norm": f"{_LAYER}operator_norm",
        "blk.{}.attn_q": f"{_LAYER}self_attn.q_proj",
        "blk.{}.attn_k": f"{_LAYER}self_attn.k_proj",
        "blk.{}.attn_v": f"{_LAYER}self_attn.v_proj",
        "blk.{}.attn_q_norm": f"{_LAYER}self_attn.q_layernorm",
        "blk.{}.attn_k_norm": f"{_LAYER}self_attn.k_layernorm",
        "blk.{}.attn_output": f"{_LAYER}self_attn.out_proj",
        "blk.{}.shortconv.conv": f"{_LAYER}conv.conv",
        "blk.{}.shortconv.in_proj": f"{_LAYER}conv.in_proj",
        "blk.{}.shortconv.out_proj": f"{_LAYER}conv.out_proj",
        "blk.{}.ffn_norm": f"{_LAYER}ffn_norm",
        "blk.{}.ffn_gate_inp": f"{_FEED}.gate",
        **{f"blk.{{}}.ffn_{ours}": f"{_FEED}.{theirs}" for ours, theirs in _PROJECTIONS.items()},
        **{f"blk.{{}}.ffn_{ours}.{{e}}": f"{_EXPERTS}.{{e}}.{theirs}" for ours, theirs in _PROJECTIONS.items()},
    },
    IGNORED,
    whole={
        f"{_EXPERTS}.gate_up_proj": "blk.{}.ffn_gate_up.{e}.weight",
        f"{_EXPERTS}.down_proj": "blk.{}.ffn_down.{e}.weight",
        f"{_FEED}.expert_bias": "blk.{}.exp_probs_b.bias",
    },
)
DENSE_DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "tie_word_embeddings": True,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
}
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "lfm2": DENSE_DEFAULTS,
    "lfm2_moe": DENSE_DEFAULTS
    | {
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "norm_topk_prob": True,
    },
    "lfm2moe": {},
}
# older names of keys in a config.json, and the name of the norm's epsilon in other families
RENAMED = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings", "norm_eps": "rms_norm_eps"}
BASE = 1e6  # of the rope, in transformers
TAPS = Key(Keys.ShortConv.L_CACHE, "conv_L_cache")
CONV_BIAS = Key("", "conv_bias")
CONV = "conv"
ATTENTION_LAYERS = Key("", "full_attn_idxs")
ADJUSTED = Key("", "block_auto_adjust_ff_dim")
MULTIPLE_OF = Key("", "block_multiple_of")
MULTIPLIER = Key("", "block_ffn_dim_multiplier")
DENSE_LAYERS = Key(Keys.LLM.LEADING_DENSE_BLOCK_COUNT, "num_dense_layers")
EXPERTS = ExpertKeys(hidden="moe_intermediate_size", normalized="norm_topk_prob", scale="routed_scaling_factor")
EPSILON = 1e-6  # added to the sum of the weights of a token's experts, as in transformers


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = _with_usual_keys(metadata.with_defaults(DEFAULTS.get(metadata.architecture, {})))
    metadata.require(CONV_BIAS, False)
    convolves = _convolves(metadata)
    has_experts = "moe" in metadata.architecture
    config = read_decoder(_with_one_head_count(metadata, convolves), experts=has_experts)
    config = replace(config, head_norm=HeadNorm.EACH, qkv_bias=False, out_bias=False)
    mlp = MLPConfig(_mlp_width(metadata))
    conv = ConvConfig(config.hidden, metadata.integer(TAPS, minimum=2, maximum=16))
    config = replace(config, layers=tuple(LayerConfig(conv if it else config.attention, mlp) for it in convolves))
    if not has_experts:
        return config
    experts = read_experts(metadata, config, EXPERTS, score=Score.SIGMOID)
    experts = replace(experts, routing=replace(experts.routing, epsilon=EPSILON))
    dense = metadata.integer(DENSE_LAYERS, 0, minimum=0)
    return with_experts(config, experts, [number >= dense for number in range(len(config.layers))])


def _with_usual_keys(metadata: Metadata) -> Metadata:
    """Return metadata with the keys of other families for those that only this one has."""
    if not metadata.is_config:
        return metadata
    values = dict(metadata.values)
    values |= {theirs: values[ours] for ours, theirs in RENAMED.items() if ours in values}
    if not isinstance(values.get("rope_parameters"), dict):
        values.setdefault("rope_theta", BASE)
    return replace(metadata, values=values)


def _convolves(metadata: Metadata) -> list[bool]:
    """Return for each layer whether it is a convolution. Raises UnsupportedModel unless at least one is attention."""
    layers = metadata.integer(LAYERS, maximum=1024)
    key = LAYER_TYPES if metadata.is_config else KV_HEADS
    if not metadata.is_config:
        convolves = [heads == 0 for heads in metadata.items(KV_HEADS, int) or ()]
    elif listed := recurrent_layers(metadata, CONV):
        convolves = listed
    else:
        key, attended = ATTENTION_LAYERS, metadata.items(ATTENTION_LAYERS, int)
        convolves = [attended is not None and number not in attended for number in range(layers)]
    if len(convolves) != layers or all(convolves):
        raise UnsupportedModel(
            f"{metadata.name(key)} has {len(convolves)} values for {layers} layers, of which {convolves.count(False)} "
            "are attention",
            "It must have one for each layer, and at least one of attention.",
        )
    return convolves


def _with_one_head_count(metadata: Metadata, convolves: list[bool]) -> Metadata:
    """Return metadata with the number of KV heads of the attention layers. GGUF files have a number for each layer.

    Raises UnsupportedModel if attention layers differ.
    """
    if metadata.is_config:
        return metadata
    counts = metadata.items(KV_HEADS, int) or ()
    heads = {count for count, convolve in zip(counts, convolves, strict=True) if not convolve}
    if len(heads) != 1:
        raise UnsupportedModel(f"{metadata.name(KV_HEADS)} has different numbers of heads: {sorted(heads)}")
    return replace(metadata, values={**metadata.values, metadata.name(KV_HEADS): heads.pop()})


def _mlp_width(metadata: Metadata) -> int:
    """Return the width of the dense MLP. In a config.json it may be a number from which the width is computed."""
    width = metadata.integer(MLP_HIDDEN)
    if not metadata.is_config or not metadata.flag(ADJUSTED):
        return width
    scaled = int(metadata.number(MULTIPLIER, minimum=0.01, maximum=100.0) * (2 * width // 3))
    multiple = metadata.integer(MULTIPLE_OF)
    return -(-scaled // multiple) * multiple
