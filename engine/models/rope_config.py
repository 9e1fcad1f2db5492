"""Read the rotary embedding of a checkpoint into a RopeConfig: from GGUF metadata keys, or from an object in a
config.json.

Unsupported values raise UnsupportedModel, which names the key.
"""

from collections.abc import Callable

from gguf.constants import Keys

from engine.checkpoints.metadata import Key, Metadata
from engine.errors import UnsupportedModel
from engine.model_config import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, RopeScaling, YarnScaling

MAX_CONTEXT = 1 << 24
MAX_FACTOR = 4096.0
PROPORTIONAL_SHARE, PROPORTIONAL_BASE = 0.25, 1_000_000.0  # defaults of Gemma 4

CONTEXT = Key(Keys.LLM.CONTEXT_LENGTH, "max_position_embeddings")
BASE = Key(Keys.Rope.FREQ_BASE, "rope_theta")
LOCAL_BASE = Key(Keys.Rope.FREQ_BASE_SWA, "rope_local_base_freq")
DIMENSIONS = Key(Keys.Rope.DIMENSION_COUNT, "partial_rotary_factor")
TYPE = Key(Keys.Rope.SCALING_TYPE, "rope_type")
FACTOR = Key(Keys.Rope.SCALING_FACTOR, "factor")
OLD_FACTOR = Key("{arch}.rope.scale_linear", "")
ORIGINAL = Key(Keys.Rope.SCALING_ORIG_CTX_LEN, "original_max_position_embeddings")
LOW = Key("", "low_freq_factor")
HIGH = Key("", "high_freq_factor")
FAST = Key(Keys.Rope.SCALING_YARN_BETA_FAST, "beta_fast")
SLOW = Key(Keys.Rope.SCALING_YARN_BETA_SLOW, "beta_slow")
YARN_ATTENTION = Key(Keys.Rope.SCALING_YARN_ATTN_FACTOR, "attention_factor")
YARN_EXTENSION = Key(Keys.Rope.SCALING_YARN_EXT_FACTOR, "")
MSCALE = Key("", "mscale")
MSCALE_ALL = Key(Keys.Rope.SCALING_YARN_LOG_MUL, "mscale_all_dim")
TRUNCATE = Key("", "truncate")
LONG_ATTENTION = Key(Keys.Rope.SCALING_ATTN_FACTOR, "attention_factor")
SHORT_FACTORS = Key("", "short_factor")
LONG_FACTORS = Key("", "long_factor")

SECTIONS = ("rope_parameters", "rope_scaling")  # keys of the rope section in a config.json, the newer one first
# keys that may be outside of the rope section instead
OUTER_KEYS = ("rope_theta", "partial_rotary_factor", "max_position_embeddings")
# names of subsections, which exist if layers with and without a window have different ropes
FULL, SLIDING = "full_attention", "sliding_attention"


def read_rope(metadata: Metadata, head_dim: int, *, interleaved: bool = False, partial: bool = False) -> RopeConfig:
    """Return the rope of all layers, or of those without a window.

    `interleaved`: whether rotary pairs are adjacent elements in the family's GGUF files. `partial`: whether the family
    may rotate only a part of each head.
    """
    section = _section(metadata, FULL)
    base = section.number(BASE, 10_000.0, **_BASES)
    return _rope(section, base, _rotary_dim(section, head_dim, partial), interleaved and not metadata.is_config)


def read_local_rope(metadata: Metadata, head_dim: int, base: float) -> RopeConfig:
    """Return the rope of layers with a window. `base` is the default if the checkpoint gives none."""
    base = metadata.number(LOCAL_BASE, base, **_BASES)
    if not metadata.is_config or SLIDING not in _sections(metadata):
        return RopeConfig(base, head_dim, interleaved=False)
    section = _section(metadata, SLIDING)
    base = section.number(BASE, base, **_BASES)
    return _rope(section, base, _rotary_dim(section, head_dim, partial=False), interleaved=False)


def read_proportional_rope(metadata: Metadata, head_dim: int) -> RopeConfig:
    """Return a rope whose frequencies are those of whole heads, but which rotates only the pairs of the first ones.

    GGUF files have the number of those pairs as a tensor, which is compared when the model is loaded.
    """
    section, share = _section(metadata, FULL), PROPORTIONAL_SHARE
    if metadata.is_config:
        section.require(TYPE, "proportional")
        section.require(FACTOR, 1.0)
        share = section.number(DIMENSIONS, share, minimum=0.0, maximum=1.0)
    pairs = int(share * head_dim // 2)
    if not pairs:
        raise UnsupportedModel(f"{section.name(DIMENSIONS)} = {share} rotates no pair of {head_dim} elements")
    base = section.number(BASE, PROPORTIONAL_BASE, **_BASES)
    return RopeConfig(base, 2 * pairs, interleaved=False, span=head_dim)


_BASES = {"minimum": 1.0001, "maximum": 1e12}


def _rope(section: Metadata, base: float, rotary_dim: int, interleaved: bool) -> RopeConfig:
    scaling = section.one_of(TYPE, _SCALINGS, _default_type(section))(section)
    if isinstance(scaling, LongRopeScaling) and scaling.short:
        for key, factors in ((SHORT_FACTORS, scaling.short), (LONG_FACTORS, scaling.long)):
            if len(factors) != rotary_dim // 2:
                raise UnsupportedModel(
                    f"{section.name(key)} has {len(factors)} numbers, but must have {rotary_dim // 2}"
                )
    return RopeConfig(base, rotary_dim, interleaved, scaling)


def _sections(metadata: Metadata) -> dict[str, object]:
    for name in SECTIONS:
        found = metadata.values.get(name)
        if isinstance(found, dict):
            return found
        if found is not None:
            raise UnsupportedModel(f"{name} is {found!r:.60}, but must be an object")
    return {}


def _section(metadata: Metadata, kind: str) -> Metadata:
    """Return the metadata keys that describe the rope of one kind of layer.

    In a config.json, `rope_type` was formerly called `type`, and keys missing in the section may be outside of it.
    """
    if not metadata.is_config:
        return metadata
    sections = _sections(metadata)
    nested = sections.get(kind)
    section = nested if isinstance(nested, dict) else sections
    outer = [name for name in OUTER_KEYS if not (name == BASE.config and kind == SLIDING)]
    values = {name: metadata.values[name] for name in outer if name in metadata.values}
    values |= {"rope_type": section["type"]} if "type" in section else {}
    values |= section
    if ORIGINAL.config in metadata.values:  # this key takes precedence over the one in the section
        values[ORIGINAL.config] = metadata.values[ORIGINAL.config]
    return Metadata(values, metadata.architecture, is_config=True)


def _rotary_dim(section: Metadata, head_dim: int, partial: bool) -> int:
    """Return the number of elements of a head that are rotated."""
    if section.is_config:
        rotary_dim = int(head_dim * section.number(DIMENSIONS, 1.0, minimum=0.0, maximum=1.0))
    else:
        rotary_dim = section.integer(DIMENSIONS, head_dim, maximum=head_dim)
    if rotary_dim % 2 or rotary_dim == 0 or not (partial or rotary_dim == head_dim):
        raise UnsupportedModel(
            f"{section.name(DIMENSIONS)} = {section.get(DIMENSIONS)!r} is not supported by this version: "
            f"it rotates {rotary_dim} of {head_dim} elements of a head"
        )
    return rotary_dim


# -- scaling


def _default_type(section: Metadata) -> str:
    scaled = not section.is_config and any(section.get(key) is not None for key in (FACTOR, OLD_FACTOR))
    return "linear" if scaled else "none"


def _unscaled(_section: Metadata) -> None:
    return None


def _linear(section: Metadata) -> RopeScaling:
    old = section.number(OLD_FACTOR, 1.0, minimum=1.0, maximum=MAX_FACTOR)
    return LinearScaling(section.number(FACTOR, old, minimum=1.0, maximum=MAX_FACTOR))


def _llama3(section: Metadata) -> RopeScaling:
    low, high = (section.number(key, minimum=0.01, maximum=1024.0) for key in (LOW, HIGH))
    if low >= high:
        raise UnsupportedModel(f"{section.name(LOW)} is {low}, but must be below the other factor, {high}")
    return Llama3Scaling(section.number(FACTOR, minimum=1.0, maximum=MAX_FACTOR), low, high, _original(section))


def _yarn(section: Metadata) -> RopeScaling:
    section.require(YARN_EXTENSION, 1.0)
    fast, slow = (
        section.number(key, default, minimum=0.01, maximum=1024.0) for key, default in ((FAST, 32.0), (SLOW, 1.0))
    )
    if slow >= fast:
        raise UnsupportedModel(f"{section.name(SLOW)} is {slow}, but must be below the other, {fast}")
    original = _original(section)
    return YarnScaling(
        factor=section.number(FACTOR, _context(section) / original, minimum=1.0, maximum=MAX_FACTOR),
        original_context=original,
        fast=fast,
        slow=slow,
        attention_factor=_attention_factor(section, YARN_ATTENTION),
        mscale=section.number(MSCALE, 0.0 if section.is_config else 1.0, minimum=0.0, maximum=100.0),
        mscale_all=section.number(MSCALE_ALL, 0.0, minimum=0.0, maximum=100.0),
        truncate=section.flag(TRUNCATE, True),
    )


def _long_rope(section: Metadata) -> RopeScaling:
    original = _original(section)
    attention = _attention_factor(section, LONG_ATTENTION)
    if not section.is_config:  # GGUF files store the factors as tensors
        return LongRopeScaling(original, 1.0, 1.0 if attention is None else attention)
    factor = section.number(FACTOR, _context(section) / original, minimum=0.0, maximum=MAX_FACTOR)
    short, long = (section.numbers(key, minimum=1e-6, maximum=1e6) for key in (SHORT_FACTORS, LONG_FACTORS))
    if not short:
        raise UnsupportedModel(f"{section.name(SHORT_FACTORS)} is empty")
    return LongRopeScaling(original, factor, attention, short, long)


def _context(section: Metadata) -> int:
    return section.integer(CONTEXT, maximum=MAX_CONTEXT)


def _original(section: Metadata) -> int:
    """Return the context length before scaling. The default is the model's context length."""
    return section.integer(
        ORIGINAL, None if section.get(ORIGINAL) else _context(section), minimum=2, maximum=MAX_CONTEXT
    )


def _attention_factor(section: Metadata, key: Key) -> float | None:
    return None if section.get(key) is None else section.number(key, minimum=0.01, maximum=100.0)


# `dynamic` is treated as unscaled. It changes frequencies only when a request exceeds the model's context, which would
# make cached keys invalid, and no request may exceed the context.
_SCALINGS: dict[str, Callable[[Metadata], RopeScaling | None]] = {
    "none": _unscaled,
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _unscaled,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _long_rope,
    "su": _long_rope,  # an earlier name of longrope
}
