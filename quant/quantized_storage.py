"""How quantized layers are saved: the tensors of a layer, and the section of config.json, for each method.

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

SECTION = "quantization_config"  # of config.json
Section = dict[str, object]


@dataclass(frozen=True, slots=True)
class Method:
    """How a model is quantized, as people ask for it."""

    name: str  # one of METHODS
    group: int | None = None  # of int4: columns that share a scale; None: as many as divide every matrix
    nested: bool = False  # of nf4: its scales are quantized, too


@dataclass(frozen=True, slots=True)
class Storage:
    """How all linear layers of one model are saved."""

    group: int | None  # columns that share a scale; None is a whole row
    bits: float  # the most that a weight takes, scales included, in matrices of 32 columns or more
    # A layer's tensors, by their names in the layer. Takes what its columns count, too, which int4 alone looks at.
    encode: Callable[[PlainTensor, Tensor | None], dict[str, Tensor]]
    section: Callable[[Sequence[str]], Section]  # of config.json; takes the layers that stay as they are


def storage(method: Method, columns: Sequence[int]) -> Storage:
    """For a model whose layers have so many columns each. Raises UnsupportedQuantization where groups do not divide."""
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
    """As the compressed-tensors package writes it (`quantization/quant_config.py`, `quantization/quant_args.py`)."""
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
