"""Checkpoints of 8-bit floats: read the kind of scales from the configuration, and a weight with its scale.

A weight `NAME.weight` is F8_E4M3 or F8_E5M2, [outputs, inputs]. A separate tensor holds its scales: one for the matrix,
one for each row, or one for each block of rows and columns. The last blocks may be partial. Published formats:

- `fp8` with `weight_block_size`: `NAME.weight_scale_inv`, [blocks down, blocks across], float32, bfloat16 or, with
  `scale_fmt` ue8m0, exponents. https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md
- `fp8` without `weight_block_size`: one `NAME.weight_scale_inv` or `NAME.weight_scale`, shape [] or [1].
- `fbgemm_fp8`: `NAME.weight_scale`, [outputs, 1]. https://huggingface.co/docs/transformers/quantization/fbgemm_fp8
- `compressed-tensors` in format `float-quantized`: `NAME.weight_scale`; its `strategy` is tensor, channel or block.
  https://github.com/vllm-project/compressed-tensors
- `modelopt` with `quant_algo` FP8: one `NAME.weight_scale`. https://github.com/NVIDIA/Model-Optimizer

`weight_scale_inv` is the inverse of the factor that quantized the weight, so codes are multiplied by it, just as by
`weight_scale`. Scales of activations are ignored: activations are not quantized with the checkpoint's scales. A weight
is quantized if its type is an 8-bit float.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quant.errors import ModelFileError, UnsupportedQuantization, printable
from quant.safetensors import SafetensorsTensor
from quant.safetensors_values import decode_plain, values
from quant.tensor import Float8Tensor, PlainTensor, blocks

Section = Mapping[str, object]  # `quantization_config` of a config.json

FLOAT8_TYPES = ("F8_E4M3", "F8_E5M2")
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")


class Tensors(Protocol):
    """An open checkpoint."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, SafetensorsTensor]: ...

    def data(self, name: str) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class Float8Scheme:
    """The scales of a checkpoint's weights. A block extent of None means that blocks span the whole matrix."""

    block: tuple[int | None, int | None]
    scale_names: tuple[str, ...] = ("weight_scale",)  # possible names of the scale tensor; each weight has exactly one


TENSOR = (None, None)
CHANNEL = (1, None)


def read_scheme(section: Section) -> Float8Scheme:
    """Return the scheme that a checkpoint's configuration names. Raises UnsupportedQuantization for unknown values."""
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise _unsupported("quant_method", method, tuple(_METHODS))
    return _METHODS[method](section)


def take(checkpoint: Tensors, name: str, scheme: Float8Scheme) -> Float8Tensor | PlainTensor:
    """Return a copy of the weight `name`, which ends in `.weight`, in canonical form.

    The result is a PlainTensor if the weight is not quantized. Raises ModelFileError if there is no such weight, or if
    its scale is missing, ambiguous, or of the wrong shape.
    """
    weight = _find(checkpoint, name)
    if weight.type.name not in FLOAT8_TYPES:
        return decode_plain(weight, checkpoint.data(name))
    module = name.removesuffix("weight")
    found = [module + suffix for suffix in scheme.scale_names if module + suffix in checkpoint.tensors]
    if len(found) > 1:
        raise ModelFileError(f"{checkpoint.path}: {name} has several scales, {' and '.join(found)}")
    scale = _find(checkpoint, found[0] if found else module + scheme.scale_names[0])
    block = _block_of(checkpoint, weight, scheme)
    grid = _grid(checkpoint, weight, scale, block)
    numbers, factors = (values(tensor, checkpoint.data(tensor.name)) for tensor in (weight, scale))
    return Float8Tensor((weight.shape[0], weight.shape[1]), weight.type.name, numbers, factors.reshape(grid), block)


def _find(checkpoint: Tensors, name: str) -> SafetensorsTensor:
    if name not in checkpoint.tensors:
        raise ModelFileError(f"{checkpoint.path} has no tensor {name}", "The checkpoint is incomplete: pull it again.")
    return checkpoint.tensors[name]


def _block_of(checkpoint: Tensors, weight: SafetensorsTensor, scheme: Float8Scheme) -> tuple[int, int]:
    """Return the numbers of rows and columns that share a scale, at most those of the matrix."""
    if len(weight.shape) != 2 or not weight.nbytes:
        raise UnsupportedQuantization(f"{checkpoint.path}: {weight.name} of shape {weight.shape} is not a matrix")
    height, width = (min(size or extent, extent) for size, extent in zip(scheme.block, weight.shape, strict=True))
    return height, width


def _grid(
    checkpoint: Tensors, weight: SafetensorsTensor, scale: SafetensorsTensor, block: tuple[int, int]
) -> tuple[int, int]:
    """Return the number of blocks, down and across. Raises ModelFileError if the scale has another shape."""
    if scale.type.name not in SCALE_TYPES:
        raise UnsupportedQuantization(
            f"{checkpoint.path}: {scale.name} is of type {scale.type.name}, which is not a type for scales"
        )
    rows, columns = weight.shape
    grid = blocks((rows, columns), block)
    spellings: set[tuple[int, ...]] = {grid}
    if block[1] == columns:
        spellings.add(grid[:1])
        if block[0] == rows:
            spellings.add(())
    if scale.shape not in spellings:
        problem = f"{scale.name} has shape {scale.shape}, but {weight.name} of shape {weight.shape} needs {grid}"
        raise ModelFileError(f"{checkpoint.path}: {problem}")
    return grid


# -- configurations: each function reads the section of one method


def _fine_grained(section: Section) -> Float8Scheme:
    _one_of(section, "fmt", (None, "e4m3"))
    _one_of(section, "scale_fmt", (None, "float", "ue8m0"))
    _one_of(section, "expert_dtype", (None, "fp8"))
    if section.get("weight_block_size") is None:
        return Float8Scheme(TENSOR, ("weight_scale_inv", "weight_scale"))
    return Float8Scheme(_block(section, "weight_block_size"), ("weight_scale_inv",))


def _fbgemm(section: Section) -> Float8Scheme:
    return Float8Scheme(CHANNEL)


def _modelopt(section: Section) -> Float8Scheme:
    _one_of(section, "quant_algo", ("FP8",))
    return Float8Scheme(TENSOR)


def _compressed_tensors(section: Section) -> Float8Scheme:
    _one_of(section, "format", ("float-quantized",))
    _one_of(section, "quantization_status", (None, "compressed"))
    _one_of(_section(section, "sparsity_config"), "format", (None, "dense"))
    if section.get("transform_config"):  # rotations of the weights are not supported
        raise _unsupported("transform_config", section["transform_config"], (None,))
    groups = _section(section, "config_groups")
    schemes = {_compressed_group(_section(_section(groups, name), "weights")) for name in groups}
    if len(schemes) != 1:
        raise UnsupportedQuantization(
            f"A checkpoint with {len(schemes)} kinds of scales is not supported: config_groups"
        )
    return schemes.pop()


def _compressed_group(weights: Section) -> Float8Scheme:
    _one_of(weights, "num_bits", (8,))
    _one_of(weights, "type", ("float",))
    _one_of(weights, "symmetric", (None, True))
    _one_of(weights, "dynamic", (None, False))
    _one_of(weights, "strategy", ("tensor", "channel", "block"))
    if weights["strategy"] == "block":
        return Float8Scheme(_block(weights, "block_structure"))
    return Float8Scheme(TENSOR if weights["strategy"] == "tensor" else CHANNEL)


_METHODS: dict[str, Callable[[Section], Float8Scheme]] = {
    "fp8": _fine_grained,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}


# -- typed look-ups


def _one_of(section: Section, key: str, known: tuple[object, ...]) -> None:
    value = section.get(key)
    if not any(type(value) is type(other) and value == other for other in known):
        raise _unsupported(key, value, known)


def _section(section: Section, key: str) -> Section:
    """Return the section under `key`, empty if it is missing."""
    value = section.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UnsupportedQuantization(
            f"The checkpoint's quantization is not readable: {printable(key)} is not a section"
        )
    return value


def _block(section: Section, key: str) -> tuple[int, int]:
    """Return the numbers of rows and columns of a block."""
    value = section.get(key)
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    raise UnsupportedQuantization(f"The checkpoint's quantization is not supported: {key} is not two positive integers")


def _unsupported(key: str, value: object, known: tuple[object, ...]) -> UnsupportedQuantization:
    shown = (
        "missing"
        if value is None
        else printable(str(value))
        if isinstance(value, str | int | float)
        else "of another type"
    )
    accepted = ", ".join(str(other) for other in known if other is not None) or "none"
    return UnsupportedQuantization(
        f"The checkpoint's quantization is not supported: {key} is {shown}", f"Supported values: {accepted}."
    )
