"""Measured figures, and the machine's peaks that they are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

COPY, TO_DEVICE, TO_HOST = (
    "copy on the card, bytes read and written",
    "copy from pinned memory",
    "copy to pinned memory",
)
BFLOAT16, FLOAT8 = "product of bf16 matrices", "product of fp8 matrices"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    unit: str
    fraction: float | None = None  # value as a fraction of a peak or a floor
    of: str = ""  # name of the peak or floor
    least: float | None = None  # lower limit of `fraction`, or of `value` if there is no fraction
    most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the figure meets its target, or None if it has no target."""
        if self.least is None and self.most is None:
            return None
        value = self.value if self.fraction is None else self.fraction
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(frozen=True, slots=True)
class Peaks:
    """The measured peak rates of the machine; 0: not measured."""

    copy: float = 0.0  # bytes read and written per second, within GPU memory
    bfloat16: float = 0.0  # operations per second of a matrix product
    float8: float = 0.0
    to_device: float = 0.0  # bytes per second, from pinned host memory
    to_host: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Self:
        """Return the peaks from figures by name, in GB/s and TFLOP/s."""
        copies = (1e9 * values.get(name, 0.0) for name in (COPY, TO_DEVICE, TO_HOST))
        products = (1e12 * values.get(name, 0.0) for name in (BFLOAT16, FLOAT8))
        copy, to_device, to_host = copies
        bfloat16, float8 = products
        return cls(copy, bfloat16, float8, to_device, to_host)


def fraction(value: float, peak: float) -> float | None:
    """Return value / peak, or None if the peak was not measured."""
    return value / peak if peak else None
