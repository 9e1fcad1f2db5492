"""An encoder on a GPU reports a lost device, so that the server ends instead of failing every request."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.embedding.encoder import Encoder, Pooling
from engine.errors import DeviceLost
from engine.model_config import EncoderConfig


@dataclass
class FailingModel:
    """A model whose calls fail, as CUDA calls do."""

    config: Any = None
    message: str = "CUDA error: an illegal memory access was encountered"

    def forward(self, ids: Tensor, second_start: int | None = None) -> Tensor:
        raise RuntimeError(self.message)


@dataclass
class Sizes:
    hidden: int = 4
    vocab_size: int = 9


def encoder(synchronize: Any) -> Encoder:
    model = FailingModel(cast(EncoderConfig, Sizes()))
    return Encoder(model, Pooling.MEAN, context_length=8, threads=1, synchronize=synchronize)


def fail() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_lost_device_ends_the_encoder() -> None:
    with encoder(fail) as lost:
        with pytest.raises(DeviceLost, match="illegal memory access"):
            lost.encode([[1, 2]])
        assert "illegal memory access" in lost.failure


def test_failed_text_on_a_working_device_does_not_end_the_encoder() -> None:
    with encoder(torch.get_num_threads) as working:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            working.encode([[1, 2]])
        assert working.failure == ""
