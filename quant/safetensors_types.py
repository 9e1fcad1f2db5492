"""The types a safetensors file can name, as data: how many bits one element takes.

Being listed here means that a file naming the type can be measured and checked; `quant.safetensors_values` says which
of them become tensors. The numbers are the format's own, tested against the `safetensors` package.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SafetensorsType:
    """One storage type. Elements of less than a byte are packed without gaps."""

    name: str
    bits: int


SAFETENSORS_TYPES: dict[str, SafetensorsType] = {
    name: SafetensorsType(name, bits)
    for bits, names in {
        4: ("F4",),
        6: ("F6_E2M3", "F6_E3M2"),
        8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
        16: ("U16", "I16", "F16", "BF16"),
        32: ("U32", "I32", "F32"),
        64: ("U64", "I64", "F64", "C64"),
    }.items()
    for name in names
}
