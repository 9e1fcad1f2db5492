"""The configuration keys that decoder families share, and the names of their weights.

A family calls `read_decoder` to get a ModelConfig, and replaces the fields that differ. Unsupported values raise
UnsupportedModel, which names the key.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.errors import UnsupportedModel
from engine.mixer_config import AttentionConfig, CacheConfig
from engine.model_config import Gate, LayerConfig, MLPConfig, ModelConfig, NormKind, NormRule
from engine.models.rope_config import CONTEXT, FULL, MAX_CONTEXT, SLIDING, read_rope
from quant.string_array import StringArray

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

# Keys of features that no family supports, each with the values that turn the feature off.
SUPPORTED_VALUES: tuple[tuple[Key, tuple[object, ...]], ...] = (
    (Key("", "mlp_bias"), (False,)),
    (Key("", "use_bidirectional_attention"), (False,)),
    (Key(Keys.Attention.CAUSAL, ""), (True,)),
)
# Keys of the number of experts. Newer versions of transformers write the first one for all families.
EXPERT_COUNTS = (
    Key(Keys.LLM.EXPERT_COUNT, "num_local_experts"), Key("", "num_experts"), Key("", "n_routed_experts"),
    Key("", "moe_num_experts"),
)  # fmt: skip


MIN_EPSILON = 1e-12  # with an epsilon of 0, a row of zeros would be divided by zero
# torch's names of weight dtypes. The value only has to be valid, because tensors have their own dtypes.
DTYPES = dict.fromkeys(
    ("float64", "double", "float32", "float", "float16", "half", "bfloat16", "float8_e4m3fn", "float8_e5m2", "auto")
)

GATES = {
    Gate.SILU: (Key("", "hidden_act"), "silu"),
    Gate.GELU: (Key("", "hidden_activation"), "gelu_pytorch_tanh"),
}
OUTER_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings")  # keys of a text_config that may be outside of it instead
MODEL_TYPE = Key("", "model_type")
LAYER_KINDS = {FULL: False, SLIDING: True}


def read_decoder(
    metadata: Metadata,
    *,
    gate: Gate = Gate.SILU,
    norm: NormKind = NormKind.RMS,
    interleaved: bool = False,
    partial_rotary: bool = False,
    experts: bool = False,
) -> ModelConfig:
    """Read the configuration keys that all families share. `read_rope` describes `interleaved` and `partial_rotary`.

    `experts`: whether the architecture has mixtures of experts, which `read_experts` reads.
    """
    hidden = metadata.integer(HIDDEN)
    heads = metadata.integer(HEADS)
    kv_heads = metadata.integer(KV_HEADS, heads)
    head_dim = metadata.integer(HEAD_DIM, max(1, hidden // heads), maximum=1024)
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} attention heads do not share {kv_heads} KV heads evenly")
    if head_dim % 2:
        raise UnsupportedModel(f"A head dimension of {head_dim} is odd, but rotary embedding needs pairs")
    _check_types(metadata)
    metadata.require(VALUE_DIM, head_dim)
    for key, allowed in SUPPORTED_VALUES:
        metadata.require(key, *allowed)
    for key in () if experts else EXPERT_COUNTS:
        metadata.require(key, 0)
    metadata.require(*GATES[gate])
    bias = metadata.flag(ATTENTION_BIAS, False) if metadata.is_config else None
    mixer = AttentionConfig(heads, CacheConfig(kv_heads, head_dim))
    layer = LayerConfig(mixer, MLPConfig(metadata.integer(MLP_HIDDEN)))
    return ModelConfig(
        architecture=metadata.architecture,
        layers=(layer,) * metadata.integer(LAYERS, maximum=1024),
        hidden=hidden,
        vocab_size=vocabulary_size(metadata),
        context_length=metadata.integer(CONTEXT, maximum=MAX_CONTEXT),
        norm=NormRule(metadata.number(EPSILONS[norm], minimum=MIN_EPSILON, maximum=0.1), norm),
        ropes=(read_rope(metadata, head_dim, interleaved=interleaved, partial=partial_rotary),),
        gate=gate,
        qkv_bias=bias,
        out_bias=bias,
        tied_head=metadata.flag(TIED, False) if metadata.is_config else None,
    )


def _check_types(metadata: Metadata) -> None:
    """Raise UnsupportedModel if a config.json has a value of an invalid type, even if the family does not use it."""
    if not metadata.is_config:
        return
    metadata.items(LAYER_TYPES, str)
    for key in (Key("", "dtype"), Key("", "torch_dtype")):
        if metadata.get(key) is not None:
            metadata.one_of(key, DTYPES)


def text_metadata(metadata: Metadata, defaults: Mapping[str, Mapping[str, object]]) -> Metadata:
    """Return the decoder's metadata, with the defaults of its architecture for missing keys.

    If a config.json describes a multimodal model, the decoder's metadata is its `text_config`. Raises UnsupportedModel
    if the architecture has no defaults.
    """
    text = metadata.values.get("text_config") if metadata.is_config else None
    if isinstance(text, dict):
        outer = {name: metadata.values[name] for name in OUTER_KEYS if name in metadata.values}
        metadata = Metadata(outer | text, metadata.architecture, is_config=True)
        metadata = replace(metadata, architecture=metadata.text(MODEL_TYPE, metadata.architecture))
    if metadata.architecture not in defaults:
        raise UnsupportedModel(
            f"text_config is a model of architecture {metadata.architecture!r}, not a decoder of this family"
        )
    return metadata.with_defaults(defaults[metadata.architecture])


def vocabulary_size(metadata: Metadata) -> int:
    """Return the number of tokens that a checkpoint states, or else that a GGUF file lists. Raises UnsupportedModel."""
    tokens = metadata.get(TOKENS)
    listed = len(tokens) if isinstance(tokens, StringArray) else None
    return metadata.integer(VOCABULARY, listed, maximum=1 << 22)


def with_windows(
    metadata: Metadata, config: ModelConfig, slides: Sequence[bool], *, local_rope: int = 0
) -> ModelConfig:
    """Return the configuration with the window and the rope of each layer.

    `slides` marks the layers that have a window, for checkpoints that do not list them. Those layers use rope
    `local_rope`.
    """
    window = metadata.integer(WINDOW, 0, minimum=0, maximum=MAX_CONTEXT)
    if not metadata.is_config and not window:
        slides = [False] * len(config.layers)
    else:
        slides = _listed_layers(metadata, len(config.layers)) or slides
    if len(slides) != len(config.layers):
        raise UnsupportedModel(f"The checkpoint lists {len(slides)} layer types for {len(config.layers)} layers")
    reach = window if 0 < window < config.context_length else None
    layers = zip(config.layers, slides, strict=True)
    return replace(config, layers=tuple(_with_window(it, reach, local_rope) if slide else it for it, slide in layers))


def _with_window(layer: LayerConfig, window: int | None, rope: int) -> LayerConfig:
    return layer.with_attention(lambda it: replace(it, cache=replace(it.cache, window=window), rope=rope))


def recurrent_layers(metadata: Metadata, kind: str) -> list[bool] | None:
    """Return for each layer of a config.json whether its type is `kind`; None: types are not listed.

    Raises UnsupportedModel unless all other layers have full attention.
    """
    kinds = metadata.items(LAYER_TYPES, str)
    if unknown := sorted({*(kinds or ())} - {kind, FULL}):
        raise UnsupportedModel(f"{LAYER_TYPES.config} has {unknown[0]!r:.60}, which is not supported")
    return [it == kind for it in kinds] if kinds else None


def without_drafts(metadata: Metadata, config: ModelConfig, key: Key) -> ModelConfig:
    """Return the configuration without the layers that draft further tokens, whose number is the value of `key`.

    GGUF files count them as layers. Raises UnsupportedModel if no other layers are left.
    """
    drafts, count = metadata.integer(key, 0, minimum=0, maximum=64), len(config.layers)
    layers = config.layers if metadata.is_config else config.layers[: max(0, count - drafts)]
    if not layers:
        counts = f"{metadata.name(key)} is {drafts}, and {metadata.name(LAYERS)} is {count}"
        raise UnsupportedModel(f"The model has no layers besides those that draft: {counts}")
    return replace(config, layers=layers, draft_layers=drafts)


def all_but_every(count: int, layers: int) -> list[bool]:
    """Return for each layer whether it has a window: all layers except every `count`-th; all layers if count is 0."""
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
    return all_but_every(metadata.integer(PATTERN, minimum=0), layers)


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
# tensors to ignore: inverse frequencies in old checkpoints, and the vision and audio parts of multimodal models
IGNORED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    r"|(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector|visual)\..+"
    r"|mtp\..+"  # layers that draft tokens
    r"|(v|mm|a)\..+"  # in GGUF files
)
TEXT_PREFIX = "language_model."  # prefix of a decoder's weight names in a multimodal model
NAMES = Names(STEMS, IGNORED)
