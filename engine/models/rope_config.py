"""How checkpoints describe their rotary embeddings: GGUF by keys of its metadata, a config.json by an object.

Reads them into a RopeConfig; odd values are refused by name. Refuses to know what becomes of the numbers.
"""

from collections.abc import Callable

from gguf.constants import Keys

from engine.checkpoints.metadata import Key, Metadata
from engine.config import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, RopeScaling, YarnScaling
from engine.errors import UnsupportedModel

MAX_CONTEXT = 1 << 24
MAX_FACTOR = 4096.0

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

SECTIONS = ("rope_parameters", "rope_scaling")  # of a config.json, the newer name first
BESIDE = ("rope_theta", "partial_rotary_factor", "max_position_embeddings")  # what a section may leave to the whole
FULL, SLIDING = "full_attention", "sliding_attention"  # the sections of a section, where kinds of layers differ


def read_rope(metadata: Metadata, head_dim: int, *, interleaved: bool = False, partial: bool = False) -> RopeConfig:
    """The rotary embedding of all layers, or of those without a window.

    `interleaved`: pairs are neighbours in the family's GGUF files; `partial`: the family may turn a part of a head.
    """
    section = _section(metadata, FULL)
    base = section.number(BASE, 10_000.0, **_BASES)
    return _rope(section, base, _dimensions(section, head_dim, partial), interleaved and not metadata.is_config)


def read_local_rope(metadata: Metadata, head_dim: int, base: float) -> RopeConfig:
    """That of the layers with a window, where they have another; `base`: where the checkpoint says none."""
    base = metadata.number(LOCAL_BASE, base, **_BASES)
    if not metadata.is_config or SLIDING not in _sections(metadata):
        return RopeConfig(base, head_dim, interleaved=False)
    section = _section(metadata, SLIDING)
    base = section.number(BASE, base, **_BASES)
    return _rope(section, base, _dimensions(section, head_dim, partial=False), interleaved=False)


_BASES = {"least": 1.0001, "most": 1e12}


def _rope(section: Metadata, base: float, turned: int, interleaved: bool) -> RopeConfig:
    scaling = section.one_of(TYPE, _SCALINGS, _default_type(section))(section)
    if isinstance(scaling, LongRopeScaling) and scaling.short:
        for key, factors in ((SHORT_FACTORS, scaling.short), (LONG_FACTORS, scaling.long)):
            if len(factors) != turned // 2:
                raise UnsupportedModel(f"{section.name(key)} has {len(factors)} numbers, and must have {turned // 2}")
    return RopeConfig(base, turned, interleaved, scaling)


def _sections(metadata: Metadata) -> dict[str, object]:
    for name in SECTIONS:
        found = metadata.values.get(name)
        if isinstance(found, dict):
            return found
        if found is not None:
            raise UnsupportedModel(f"{name} is {found!r:.60}, and must be an object")
    return {}


def _section(metadata: Metadata, kind: str) -> Metadata:
    """Where the embedding of one kind of layer is described. In a config.json its type had another name once, and what
    it leaves out stands beside it."""
    if not metadata.is_config:
        return metadata
    sections = _sections(metadata)
    nested = sections.get(kind)
    section = nested if isinstance(nested, dict) else sections
    beside = [name for name in BESIDE if not (name == BASE.config and kind == SLIDING)]
    values = {name: metadata.values[name] for name in beside if name in metadata.values}
    values |= {"rope_type": section["type"]} if "type" in section else {}
    values |= section
    if ORIGINAL.config in metadata.values:  # beside the section, it is the one that counts
        values[ORIGINAL.config] = metadata.values[ORIGINAL.config]
    return Metadata(values, metadata.architecture, is_config=True)


def _dimensions(section: Metadata, head_dim: int, partial: bool) -> int:
    """How many elements of a head turn."""
    if section.is_config:
        turned = int(head_dim * section.number(DIMENSIONS, 1.0, least=0.0, most=1.0))
    else:
        turned = section.integer(DIMENSIONS, head_dim, most=head_dim)
    if turned % 2 or turned == 0 or not (partial or turned == head_dim):
        raise UnsupportedModel(
            f"{section.name(DIMENSIONS)} = {section.get(DIMENSIONS)!r} is not supported by this version: "
            f"it turns {turned} of {head_dim} elements of a head"
        )
    return turned


# -- scaling


def _default_type(section: Metadata) -> str:
    scaled = not section.is_config and any(section.get(key) is not None for key in (FACTOR, OLD_FACTOR))
    return "linear" if scaled else "none"


def _unscaled(_section: Metadata) -> None:
    return None


def _linear(section: Metadata) -> RopeScaling:
    old = section.number(OLD_FACTOR, 1.0, least=1.0, most=MAX_FACTOR)
    return LinearScaling(section.number(FACTOR, old, least=1.0, most=MAX_FACTOR))


def _llama3(section: Metadata) -> RopeScaling:
    low, high = (section.number(key, least=0.01, most=1024.0) for key in (LOW, HIGH))
    if low >= high:
        raise UnsupportedModel(f"{section.name(LOW)} is {low}, and must be below the other factor, {high}")
    return Llama3Scaling(section.number(FACTOR, least=1.0, most=MAX_FACTOR), low, high, _original(section))


def _yarn(section: Metadata) -> RopeScaling:
    section.refuse(YARN_EXTENSION, 1.0)
    fast, slow = (section.number(key, default, least=0.01, most=1024.0) for key, default in ((FAST, 32.0), (SLOW, 1.0)))
    if slow >= fast:
        raise UnsupportedModel(f"{section.name(SLOW)} is {slow}, and must be below the other, {fast}")
    original = _original(section)
    return YarnScaling(
        factor=section.number(FACTOR, _context(section) / original, least=1.0, most=MAX_FACTOR),
        original_context=original,
        fast=fast,
        slow=slow,
        attention_factor=_attention_factor(section, YARN_ATTENTION),
        mscale=section.number(MSCALE, 0.0 if section.is_config else 1.0, least=0.0, most=100.0),
        mscale_all=section.number(MSCALE_ALL, 0.0, least=0.0, most=100.0),
        truncate=section.flag(TRUNCATE, True),
    )


def _longrope(section: Metadata) -> RopeScaling:
    original = _original(section)
    attention = _attention_factor(section, LONG_ATTENTION)
    if not section.is_config:  # the factors are tensors
        return LongRopeScaling(original, 1.0, 1.0 if attention is None else attention)
    factor = section.number(FACTOR, _context(section) / original, least=0.0, most=MAX_FACTOR)
    short, long = (section.numbers(key, least=1e-6, most=1e6) for key in (SHORT_FACTORS, LONG_FACTORS))
    if not short:
        raise UnsupportedModel(f"{section.name(SHORT_FACTORS)} is empty")
    return LongRopeScaling(original, factor, attention, short, long)


def _context(section: Metadata) -> int:
    return section.integer(CONTEXT, most=MAX_CONTEXT)


def _original(section: Metadata) -> int:
    """The context before it was stretched: where none is named, the one that the model has."""
    return section.integer(ORIGINAL, None if section.get(ORIGINAL) else _context(section), least=2, most=MAX_CONTEXT)


def _attention_factor(section: Metadata, key: Key) -> float | None:
    return None if section.get(key) is None else section.number(key, least=0.01, most=100.0)


# `dynamic` stretches frequencies when a request outgrows the model's context. Cached keys could not follow, and no
# request may: within the context it is no scaling.
_SCALINGS: dict[str, Callable[[Metadata], RopeScaling | None]] = {
    "none": _unscaled,
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _unscaled,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its first name
}
