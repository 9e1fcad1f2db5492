"""What the decoder families share in their configuration: one table of keys, read into a ModelConfig.

A family reads it, and replaces what it does in its own way. Odd values are refused by name.
"""

from collections.abc import Callable

from engine.checkpoint_config import Key, Metadata
from engine.config import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig, RopeScaling
from engine.errors import UnsupportedModel

MAX_CONTEXT = 1 << 24

LAYERS = Key("{arch}.block_count", "num_hidden_layers")
HIDDEN = Key("{arch}.embedding_length", "hidden_size")
HEADS = Key("{arch}.attention.head_count", "num_attention_heads")
KV_HEADS = Key("{arch}.attention.head_count_kv", "num_key_value_heads")
HEAD_DIM = Key("{arch}.attention.key_length", "head_dim")
VALUE_DIM = Key("{arch}.attention.value_length", "")
MLP_HIDDEN = Key("{arch}.feed_forward_length", "intermediate_size")
VOCABULARY = Key("{arch}.vocab_size", "vocab_size")
TOKENS = Key("tokenizer.ggml.tokens", "")
CONTEXT = Key("{arch}.context_length", "max_position_embeddings")
EPSILON = Key("{arch}.attention.layer_norm_rms_epsilon", "rms_norm_eps")
EXPERTS = Key("{arch}.expert_count", "num_local_experts")
TIED = Key("", "tie_word_embeddings")

ROPE_BASE = Key("{arch}.rope.freq_base", "rope_theta")
ROPE_DIMENSIONS = Key("{arch}.rope.dimension_count", "")
ROPE_TYPE = Key("{arch}.rope.scaling.type", "rope_type")
ROPE_FACTOR = Key("{arch}.rope.scaling.factor", "factor")
ROPE_ORIGINAL = Key("{arch}.rope.scaling.original_context_length", "original_max_position_embeddings")
ROPE_LOW = Key("", "low_freq_factor")
ROPE_HIGH = Key("", "high_freq_factor")
ROPE_SECTIONS = ("rope_parameters", "rope_scaling")  # of a config.json, the newer name first


def read_decoder(metadata: Metadata, *, interleaved: bool = False) -> ModelConfig:
    """The shape that all families have; `interleaved`: pairs are neighbours in the family's GGUF files."""
    hidden = metadata.integer(HIDDEN)
    heads = metadata.integer(HEADS)
    kv_heads = metadata.integer(KV_HEADS, heads)
    head_dim = metadata.integer(HEAD_DIM, max(1, hidden // heads), most=1024)
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} attention heads do not share {kv_heads} KV heads evenly")
    if head_dim % 2:
        raise UnsupportedModel(f"A head dimension of {head_dim} is odd, and rotary embedding needs pairs")
    metadata.refuse(VALUE_DIM, head_dim)
    metadata.refuse(EXPERTS, 0)
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
        norm_epsilon=metadata.number(EPSILON, least=0.0, most=0.1),
        ropes=(read_rope(metadata, head_dim, interleaved=interleaved),),
        tied_head=metadata.flag(TIED, False) if metadata.is_config else None,
    )


def _vocabulary(metadata: Metadata) -> int | None:
    tokens = metadata.get(TOKENS)
    return len(tokens) if isinstance(tokens, tuple) else None


def read_rope(metadata: Metadata, head_dim: int, *, interleaved: bool) -> RopeConfig:
    """The rotary embedding, where a model has one for all layers."""
    if not metadata.is_config:
        metadata.refuse(ROPE_DIMENSIONS, head_dim)
    section = rope_section(metadata)
    scaling = section.one_of(ROPE_TYPE, _SCALINGS, "default" if metadata.is_config else _gguf_default(metadata))(
        section
    )
    base = section.number(ROPE_BASE, metadata.number(ROPE_BASE, 10_000.0, least=1.0, most=1e12), least=1.0, most=1e12)
    return RopeConfig(base, head_dim, interleaved and not metadata.is_config, scaling)


def rope_section(metadata: Metadata) -> Metadata:
    """Where the rotary embedding is described. In a config.json it is an object, whose type had another name once."""
    if not metadata.is_config:
        return metadata
    section = next((found for name in ROPE_SECTIONS if isinstance(found := metadata.values.get(name), dict)), {})
    values = {"rope_type": section["type"], **section} if "type" in section else section
    return Metadata(values, metadata.architecture, is_config=True)


def _gguf_default(metadata: Metadata) -> str:
    return "linear" if metadata.get(ROPE_FACTOR) is not None else "none"


def _linear(section: Metadata) -> RopeScaling:
    return LinearScaling(section.number(ROPE_FACTOR, 1.0, least=1.0, most=1024.0))


def _llama3(section: Metadata) -> RopeScaling:
    low, high = (section.number(key, least=0.01, most=1024.0) for key in (ROPE_LOW, ROPE_HIGH))
    if low >= high:
        raise UnsupportedModel(f"{section.name(ROPE_LOW)} is {low}, and must be below the other factor, {high}")
    factor = section.number(ROPE_FACTOR, least=1.0, most=1024.0)
    return Llama3Scaling(factor, low, high, section.integer(ROPE_ORIGINAL, most=MAX_CONTEXT))


_SCALINGS: dict[str, Callable[[Metadata], RopeScaling | None]] = {
    "none": lambda _section: None,
    "default": lambda _section: None,
    "linear": _linear,
    "llama3": _llama3,
}
