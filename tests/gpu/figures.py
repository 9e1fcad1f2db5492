"""What is measured: figures, and the peaks of the machine that they are fractions of. Refuses to know how."""

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
    fraction: float | None = None  # of a peak or a floor
    of: str = ""  # which
    least: float | None = None  # what is aimed for: of the fraction where there is one, else of the value
    most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether it is what was aimed for; None: nothing was."""
        if self.least is None and self.most is None:
            return None
        value = self.value if self.fraction is None else self.fraction
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that the machine was measured to do; 0: it was not measured."""

    copy: float = 0.0  # bytes read and written in a second, from its memory to its memory
    bfloat16: float = 0.0  # operations of a product of matrices in a second
    float8: float = 0.0
    to_device: float = 0.0  # bytes in a second, from pinned memory of the host
    to_host: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Self:
        """From figures, in GB/s and TFLOP/s, by name."""
        copies = (1e9 * values.get(name, 0.0) for name in (COPY, TO_DEVICE, TO_HOST))
        products = (1e12 * values.get(name, 0.0) for name in (BFLOAT16, FLOAT8))
        copy, to_device, to_host = copies
        bfloat16, float8 = products
        return cls(copy, bfloat16, float8, to_device, to_host)


def fraction(value: float, peak: float) -> float | None:
    """None where the peak was not measured."""
    return value / peak if peak else None
