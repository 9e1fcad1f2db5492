"""What weights and caches take by formula, for a model of which nothing but its figures is known.

A decoder keeps a key and a value for each token, layer and KV head: 2 * layers * KV heads * head dimension numbers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_COUNT = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?([kmbt]?)", re.IGNORECASE)
_UNITS: Mapping[str, int] = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
BITS = (16, 8, 4)


@dataclass(frozen=True, slots=True)
class KVShape:
    """The figures that the caches depend on."""

    layers: int
    kv_heads: int
    head_dim: int

    def token_bytes(self, bits: int) -> int:
        """That one token's keys and values take, in so many bits each."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bits // 8


def weight_bytes(parameters: int, bits: int) -> int:
    return parameters * bits // 8


def read_count(text: str) -> int:
    """A number of parameters, as people write it: 70b, 1.5B, 135m, 7000000000. Raises ValueError."""
    found = _COUNT.fullmatch(text.strip()) or re.fullmatch(r"(\d{1,15})()", text.strip())
    if found is None:
        raise ValueError(f"must be a number such as 70b, 1.5b or 135m, not {text!r}")
    return round(float(found[1]) * _UNITS[found[2].lower()])
