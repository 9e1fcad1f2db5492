"""Formats of quantized linear layers in safetensors checkpoints: a table from `quant_method` to a decoder.

A layer is quantized if it has tensors other than a float weight and a bias. The decoder that config.json names then
reads the layer.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from quant import awq, bitsandbytes, compressed_tensors, float8, gptq
from quant.errors import UnsupportedQuantization, printable
from quant.quantization_section import OTHER_COPY
from quant.safetensors import SafetensorsTensor
from quant.safetensors_values import PLAIN_TYPES, values
from quant.tensor import QTensor

Section = Mapping[str, object]  # `quantization_config` of a config.json
LayerNames = Mapping[str, str]  # maps the name of a tensor in its layer ("weight_scale") to its full name

# Tensors of quantized layers that decoders ignore: biases are read elsewhere, and scales of activations and caches are
# not used.
UNUSED_TENSORS = frozenset({"bias", *compressed_tensors.UNUSED_TENSORS, "k_scale", "v_scale"})


def _alike(_layer: str) -> Hashable:
    return None


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """The quantization settings of a checkpoint's layers, and the decoder that reads them."""

    # Returns a copy of a layer's weight, decoded from its tensors. Raises ModelFileError or UnsupportedQuantization.
    decode: Callable[[float8.Tensors, str, LayerNames], QTensor]
    scheme: Callable[[str], Hashable] = _alike  # layers with equal schemes and tensor types have equal layouts


def is_quantized(tensors: Mapping[str, SafetensorsTensor]) -> bool:
    """Whether a layer with these tensors, keyed by their names in it, is quantized."""
    weight = tensors.get("weight")
    return bool(tensors.keys() - UNUSED_TENSORS - {"weight"}) or (
        weight is not None and weight.type.name not in PLAIN_TYPES
    )


def read_format(section: object) -> LayerFormat:
    """Return the format for a `quantization_config`. Raises UnsupportedQuantization or ModelFileError."""
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(method, str) or method not in _METHODS:
        shown = printable(method) if isinstance(method, str) else "not named"
        known = ", ".join(_METHODS)
        raise UnsupportedQuantization(
            f"The checkpoint's quantization is {shown}; this version supports {known}", OTHER_COPY
        )
    return _METHODS[method](section)


def _not_quantized(checkpoint: float8.Tensors, layer: str, names: LayerNames) -> QTensor:
    raise UnsupportedQuantization(
        f"{checkpoint.path}: {layer} has {', '.join(sorted(names)[:5])}, and config.json has no quantization_config",
        OTHER_COPY,
    )


NOT_QUANTIZED = LayerFormat(_not_quantized)  # the format of a checkpoint without a quantization_config


def _values(checkpoint: float8.Tensors, names: LayerNames) -> dict[str, Tensor]:
    return {name: values(checkpoint.tensors[whole], checkpoint.data(whole)) for name, whole in names.items()}


def _gptq(section: Section) -> LayerFormat:
    config = gptq.GPTQ.read(section)
    return LayerFormat(lambda checkpoint, layer, names: gptq.decode(layer, _values(checkpoint, names), config))


def _awq(section: Section) -> LayerFormat:
    config = awq.AWQ.read(section)
    return LayerFormat(lambda checkpoint, layer, names: awq.decode(layer, _values(checkpoint, names), config))


def _bitsandbytes(section: Section) -> LayerFormat:
    config = bitsandbytes.BitsAndBytes.read(section)
    return LayerFormat(lambda checkpoint, layer, names: bitsandbytes.decode(layer, _values(checkpoint, names), config))


def _float8(section: Section) -> LayerFormat:
    scheme = float8.read_scheme(section)
    return LayerFormat(
        lambda checkpoint, layer, names: float8.take(checkpoint, names.get("weight", f"{layer}.weight"), scheme)
    )


def _compressed(section: Section) -> LayerFormat:
    if section.get("format") == "float-quantized":
        return _float8(section)
    scheme = partial(compressed_tensors.PackQuantized.read, section)
    return LayerFormat(
        lambda checkpoint, layer, names: compressed_tensors.decode(layer, _values(checkpoint, names), scheme(layer)),
        scheme,
    )


def _mxfp4(_section: Section) -> LayerFormat:
    """Return the format of the layers besides experts, which are floats. `quant.mxfp4` decodes the experts."""
    return NOT_QUANTIZED


_METHODS: dict[str, Callable[[Section], LayerFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _float8,
    "fbgemm_fp8": _float8,
    "modelopt": _float8,
    "mxfp4": _mxfp4,
}
