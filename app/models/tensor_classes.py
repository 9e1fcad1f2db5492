"""Classes of a model's tensors, such as attention or norms, by tensor name, and the size of each class.

The names are those of GGUF files and of transformers' checkpoints.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.checkpoints.checkpoint import NOTHING

# The first pattern that matches a tensor's name gives its class.
_CLASSES: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "norms": r"norm|\bln_|layernorm",
        "head": r"^output\.|lm_head|^score\.|^cls\.",
        "embedding": r"embd|embed|\bwte\b|\bwpe\b|token_types",
        "attention": r"attn|attention",
        "MLP": r"ffn|mlp|experts|feed_forward|intermediate|\.output\.dense",
        "other": "",
    }.items()
}
UNUSED = "unused"  # tensors that are not loaded: those that draft further tokens, or process images or audio
_ORDER = ("embedding", "attention", "MLP", "norms", "head", "other", UNUSED)
# Tensors that belong to a quantized weight but are not weights: scales, zero points, orders, and tables.
_BESIDE = re.compile(
    r"(?:scales?|zeros|g_idx|zero_point|shape|scale_inv|absmax|quant_map|quant_state\S*|SCB|weight_format|k_scale)$"
)
_PACKED = re.compile(r"(?:qweight|weight_packed)$")


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """A tensor as a header lists it."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Totals of the tensors of one class, such as attention or norms."""

    name: str
    types: dict[str, int]  # type -> bytes, the largest first
    tensors: int
    parameters: int
    size: int  # bytes


def classes_of(
    tensors: Iterable[HeaderTensor], bits: int | None = None, ignored: re.Pattern[str] = NOTHING
) -> list[TensorClass]:
    """Return the classes that the model has tensors of.

    `bits`: bits of a weight that is packed into wider integers. `ignored` matches the names of tensors of class UNUSED.
    """
    found: dict[str, list[HeaderTensor]] = {name: [] for name in _ORDER}
    for tensor in tensors:
        found[UNUSED if ignored.fullmatch(tensor.name) else class_of(tensor.name)].append(tensor)
    return [_sum(name, members, bits) for name, members in found.items() if members]


def class_of(name: str) -> str:
    return next(kind for kind, pattern in _CLASSES.items() if pattern.search(name))


def parameters_of(tensor: HeaderTensor, bits: int | None) -> int:
    """Return the number of weights in a tensor."""
    elements = math.prod(tensor.shape)
    if _BESIDE.search(tensor.name):
        return 0
    packed = _PACKED.search(tensor.name) or (bits == 4 and tensor.type == "U8")
    return 8 * tensor.nbytes // bits if packed and bits else elements


def _sum(name: str, tensors: list[HeaderTensor], bits: int | None) -> TensorClass:
    types: dict[str, int] = {}
    for tensor in tensors:
        types[tensor.type] = types.get(tensor.type, 0) + tensor.nbytes
    return TensorClass(
        name,
        dict(sorted(types.items(), key=lambda item: -item[1])),
        len(tensors),
        sum(parameters_of(tensor, bits) for tensor in tensors),
        sum(types.values()),
    )
