"""Storage of quantized layers: the tensors of a layer, and the section of config.json, for each method.

fp8     compressed-tensors, format "float-quantized", a scale for each row
int4    compressed-tensors, format "pack-quantized", asymmetric, in groups of columns
nf4     bitsandbytes, 4 bits
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quant import bitsandbytes, compressed_tensors
from quant.quantize import NF4_BLOCK, check_divisible, fp8, group_size, int4, nf4
from quant.tensor import PlainTensor

SECTION = "quantization_config"  # key in config.json
Section = dict[str, object]


@dataclass(frozen=True, slots=True)
class Method:
    """A quantization method with its options, as the user requests it."""

    name: str  # one of METHODS
    group: int | None = None  # int4: columns that share a scale; None: the largest size that divides every matrix
    nested: bool = False  # nf4: whether its scales are also quantized


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage of all linear layers of one model."""

    group: int | None  # columns that share a scale; None: a whole row
    bits: float  # upper limit of the bits per weight, including scales, in matrices of at least 32 columns
    # Returns a layer's tensors by their names in it. The second argument is the importance of its columns, used by int4
    # alone.
    encode: Callable[[PlainTensor, Tensor | None], dict[str, Tensor]]
    # returns the section of config.json; the argument lists the layers that are not quantized
    section: Callable[[Sequence[str]], Section]


def storage(method: Method, columns: Sequence[int]) -> Storage:
    """Return the storage for a model whose layers have the given column counts.

    Raises UnsupportedQuantization if groups do not divide one of them.
    """
    return METHODS[method.name](method, columns)


def _fp8(method: Method, columns: Sequence[int]) -> Storage:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None}

    def encode(weight: PlainTensor, _importance: Tensor | None) -> dict[str, Tensor]:
        quantized = fp8(weight)
        return {"weight": quantized.values, "weight_scale": quantized.scale}

    return Storage(None, 8.5, encode, lambda kept: _compressed_tensors("float-quantized", scheme, kept))


def _int4(method: Method, columns: Sequence[int]) -> Storage:
    group = method.group or group_size(columns)
    check_divisible(columns, group)
    scheme = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": group}
    return Storage(
        group,
        4 + 24 / group,
        lambda weight, importance: compressed_tensors.encode(int4(weight, group, importance)),
        lambda kept: _compressed_tensors("pack-quantized", scheme, kept),
    )


def _nf4(method: Method, columns: Sequence[int]) -> Storage:
    check_divisible(columns, NF4_BLOCK)
    return Storage(
        NF4_BLOCK,
        4.75,
        lambda weight, _importance: bitsandbytes.encode(nf4(weight, nested=method.nested), weight.values.dtype),
        lambda kept: {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": method.nested,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(kept),
        },
    )


def _compressed_tensors(layout: str, weights: Section, kept: Sequence[str]) -> Section:
    """Return a section in the form that compressed-tensors writes (`quantization/quant_config.py`, `quant_args.py`)."""
    scheme = {"targets": ["Linear"], "weights": weights | {"dynamic": False, "actorder": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme | {"input_activations": None, "output_activations": None}},
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


METHODS: dict[str, Callable[[Method, Sequence[int]], Storage]] = {"fp8": _fp8, "int4": _int4, "nf4": _nf4}
