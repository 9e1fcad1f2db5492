"""The backend that makes layers for a GPU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.cuda.experts import CudaExpert, ExpertStack, stacked, with_own_scales
from quant.cuda.joining import joined
from quant.cuda.linear import CudaLinear
from quant.cuda.loading import to_device
from quant.cuda.matrix import CudaMatrix
from quant.kernels.card import Card
from quant.kernels.tiles import MeasuredTiles
from quant.linear import QLinear, Use
from quant.tensor import QTensor


@dataclass(frozen=True)
class CudaBackend:
    """Makes `CudaLinear` layers for one GPU."""

    device: torch.device
    card: Card
    deterministic: bool  # the bits of a row do not depend on the rest of the batch
    measured: MeasuredTiles | None = None  # measured tiles, which take precedence over computed ones
    integer_prompts: bool = False  # whether inputs of many tokens are rounded to 8-bit integers
    name: str = "cuda"

    def linear(self, segments: Sequence[QTensor], use: Use = Use.PRODUCTS) -> QLinear:
        matrices = self._matrices(segments, use)
        return CudaLinear(
            matrices,
            self.card,
            deterministic=self.deterministic,
            measured=self.measured,
            integer_prompts=self.integer_prompts,
        )

    def experts(self, layers: Iterable[Sequence[QTensor]], count: int) -> tuple[QLinear, ...]:
        stack = self.stack(layers, count)
        return tuple(CudaExpert(stack, number) for number in range(count))

    def stack(self, layers: Iterable[Sequence[QTensor]], count: int) -> ExpertStack:
        """Return the layers of `experts` in one object."""
        matrices = stacked((self._matrices(map(with_own_scales, segments)) for segments in layers), count)
        return ExpertStack(
            matrices,
            count,
            self.card,
            deterministic=self.deterministic,
            measured=self.measured,
            integer_prompts=self.integer_prompts,
        )

    def to_device(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def _matrices(self, segments: Iterable[QTensor], use: Use = Use.PRODUCTS) -> list[CudaMatrix]:
        return list(joined([to_device(segment, self.device, use) for segment in segments]))
