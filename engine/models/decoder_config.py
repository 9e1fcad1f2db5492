"""What the decoder families share: the keys of their configuration, read into a ModelConfig, and the names of weights.

A family reads it, and replaces what it does in its own way. Unsupported values are refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.config import Gate, LayerConfig, ModelConfig, NormKind, NormRule
from engine.errors import UnsupportedModel
from engine.models.rope_config import CONTEXT, FULL, MAX_CONTEXT, SLIDING, read_rope

LAYERS = Key(Keys.LLM.BLOCK_COUNT, "num_hidden_layers")
HIDDEN = Key(Keys.LLM.EMBEDDING_LENGTH, "hidden_size")
HEADS = Key(Keys.Attention.HEAD_COUNT, "num_attention_heads")
KV_HEADS = Key(Keys.Attention.HEAD_COUNT_KV, "num_key_value_heads")
HEAD_DIM = Key(Keys.Attention.KEY_LENGTH, "head_dim")
VALUE_DIM = Key(Keys.Attention.VALUE_LENGTH, "")
MLP_HIDDEN = Key(Keys.LLM.FEED_FORWARD_LENGTH, "intermediate_size")
VOCABULARY = Key(Keys.LLM.VOCAB_SIZE, "vocab_size")
TOKENS = Key(Keys.Tokenizer.LIST, "")
EPSILONS = {
    NormKind.RMS: Key(Keys.Attention.LAYERNORM_RMS_EPS, "rms_norm_eps"),
    NormKind.LAYER: Key(Keys.Attention.LAYERNORM_EPS, "layer_norm_eps"),
}
TIED = Key("", "tie_word_embeddings")

ATTENTION_BIAS = Key("", "attention_bias")
WINDOW = Key(Keys.Attention.SLIDING_WINDOW, "sliding_window")
PATTERN = Key(Keys.Attention.SLIDING_WINDOW_PATTERN, "sliding_window_pattern")
LAYER_TYPES = Key("", "layer_types")

# What no family has, by the only values that change nothing.
REFUSED: tuple[tuple[Key, tuple[object, ...]], ...] = (
    (Key(Keys.LLM.EXPERT_COUNT, "num_local_experts"), (0,)),
    (Key("", "num_experts"), (0,)),
    (Key("", "n_routed_experts"), (0,)),
    (Key("", "mlp_bias"), (False,)),
    (Key("", "use_bidirectional_attention"), (False,)),
    (Key(Keys.Attention.CAUSAL, ""), (True,)),
)


LEAST_EPSILON = 1e-12  # 0 divides by zero where a row is zero
DTYPES = dict.fromkeys(  # of weights, as torch names them; tensors have types of their own, and this must only be one
    ("float64", "double", "float32", "float", "float16", "half", "bfloat16", "float8_e4m3fn", "float8_e5m2", "auto")
)

GATES = {
    Gate.SILU: (Key("", "hidden_act"), "silu"),
    Gate.GELU: (Key("", "hidden_activation"), "gelu_pytorch_tanh"),
}
BESIDE_TEXT = ("dtype", "torch_dtype", "tie_word_embeddings")  # what it may leave to the whole
MODEL_TYPE = Key("", "model_type")
LAYER_KINDS = {FULL: False, SLIDING: True}


def read_decoder(
    metadata: Metadata,
    *,
    gate: Gate = Gate.SILU,
    norm: NormKind = NormKind.RMS,
    interleaved: bool = False,
    partial_rotary: bool = False,
) -> ModelConfig:
    """The shape that all families have; `interleaved` and `partial_rotary`: see `read_rope`."""
    hidden = metadata.integer(HIDDEN)
    heads = metadata.integer(HEADS)
    kv_heads = metadata.integer(KV_HEADS, heads)
    head_dim = metadata.integer(HEAD_DIM, max(1, hidden // heads), most=1024)
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} attention heads do not share {kv_heads} KV heads evenly")
    if head_dim % 2:
        raise UnsupportedModel(f"A head dimension of {head_dim} is odd, and rotary embedding needs pairs")
    _check_types(metadata)
    metadata.refuse(VALUE_DIM, head_dim)
    for key, allowed in REFUSED:
        metadata.refuse(key, *allowed)
    metadata.refuse(*GATES[gate])
    bias = metadata.flag(ATTENTION_BIAS, False) if metadata.is_config else None
    return ModelConfig(
        architecture=metadata.architecture,
        layers=metadata.integer(LAYERS, most=1024),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_hidden=metadata.integer(MLP_HIDDEN),
        vocab_size=metadata.integer(VOCABULARY, _vocabulary(metadata), most=1 << 22),
        context_length=metadata.integer(CONTEXT, most=MAX_CONTEXT),
        norm=NormRule(metadata.number(EPSILONS[norm], least=LEAST_EPSILON, most=0.1), norm),
        ropes=(read_rope(metadata, head_dim, interleaved=interleaved, partial=partial_rotary),),
        gate=gate,
        qkv_bias=bias,
        out_bias=bias,
        tied_head=metadata.flag(TIED, False) if metadata.is_config else None,
    )


def _check_types(metadata: Metadata) -> None:
    """Raise UnsupportedModel for a value of a config.json whose type makes no sense, though no family may read it."""
    if not metadata.is_config:
        return
    metadata.items(LAYER_TYPES, str)
    for key in (Key("", "dtype"), Key("", "torch_dtype")):
        if metadata.get(key) is not None:
            metadata.one_of(key, DTYPES)


def text_part(metadata: Metadata, defaults: Mapping[str, Mapping[str, object]]) -> Metadata:
    """That of the decoder, where a config.json describes a larger model around it, with its architecture's defaults."""
    text = metadata.values.get("text_config") if metadata.is_config else None
    if isinstance(text, dict):
        beside = {name: metadata.values[name] for name in BESIDE_TEXT if name in metadata.values}
        metadata = Metadata(beside | text, metadata.architecture, is_config=True)
        metadata = replace(metadata, architecture=metadata.text(MODEL_TYPE, metadata.architecture))
    if metadata.architecture not in defaults:
        raise UnsupportedModel(
            f"text_config is a model of architecture {metadata.architecture!r}, not a decoder of this family"
        )
    return metadata.with_defaults(defaults[metadata.architecture])


def _vocabulary(metadata: Metadata) -> int | None:
    tokens = metadata.get(TOKENS)
    return len(tokens) if isinstance(tokens, tuple) else None


def read_layout(
    metadata: Metadata, config: ModelConfig, slides: Sequence[bool], *, local_rope: int = 0
) -> tuple[LayerConfig, ...]:
    """Which layers have a window; `slides`: where the checkpoint does not list them. They turn by rope `local_rope`."""
    window = metadata.integer(WINDOW, 0, least=0, most=MAX_CONTEXT)
    if not metadata.is_config and not window:
        slides = [False] * config.layers
    else:
        slides = _listed_layers(metadata, config.layers) or slides
    if len(slides) != config.layers:
        raise UnsupportedModel(f"The checkpoint lists the kinds of {len(slides)} layers, and has {config.layers}")
    reach = window if 0 < window < config.context_length else None
    return tuple(LayerConfig(reach, local_rope) if slide else LayerConfig() for slide in slides)


def every(count: int, layers: int) -> list[bool]:
    """All layers slide but every `count`-th; 0: all do."""
    return [count == 0 or (number + 1) % count != 0 for number in range(layers)]


def _slides(kind: str) -> bool:
    if kind not in LAYER_KINDS:
        raise UnsupportedModel(f"{LAYER_TYPES.config} has {kind!r:.60}, which is not supported by this version")
    return LAYER_KINDS[kind]


def _listed_layers(metadata: Metadata, layers: int) -> list[bool] | None:
    kinds = metadata.items(LAYER_TYPES, str) if metadata.is_config else None
    if kinds is not None:
        return [_slides(kind) for kind in kinds]
    if isinstance(metadata.get(PATTERN), tuple):
        return list(metadata.items(PATTERN, bool) or ())
    if metadata.get(PATTERN) is None:
        return None
    return every(metadata.integer(PATTERN, least=0), layers)


STEMS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
IGNORED = re.compile(  # what old checkpoints repeat of their configuration, and what sees images for the decoder
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(model\.)?(vision_tower|multi_modal_projector)\..+"
)
TEXT_PREFIX = "language_model."  # somewhere in the names of a decoder that is a part of a larger model
NAMES = Names(STEMS, IGNORED)
