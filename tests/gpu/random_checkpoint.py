"""A checkpoint with random weights that are made on the device that uses them. No file is read."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Self

import torch

from engine.checkpoints.checkpoint import Names, StoredWeight
from engine.checkpoints.metadata import Metadata
from engine.config import ModelConfig
from quant.tensor import PlainTensor, QTensor
from tests.kernels.weights import weight
from tests.support.weight_mixes import Q4_K_M, kind_in_mix

META = torch.device("meta")


class RandomCheckpoint:
    """A Llama checkpoint; implements `engine.checkpoints.checkpoint.Checkpoint`.

    `mix`: a kind of weights for all matrices, or Q4_K_M.
    """

    path = Path("random weights")

    def __init__(self, model: ModelConfig, mix: str, device: torch.device) -> None:
        self.digest = f"{mix} {model!r}"
        self._model, self._mix, self._device = model, mix, device

    @property
    def metadata(self) -> Metadata:
        model = self._model
        values = {
            "num_hidden_layers": model.layers,
            "hidden_size": model.hidden,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "intermediate_size": model.mlp_hidden,
            "vocab_size": model.vocab_size,
            "max_position_embeddings": model.context_length,
            "rms_norm_eps": model.norm.epsilon,
            "rope_theta": model.ropes[0].base,
        }
        return Metadata(values, "llama", is_config=True)

    def weights(self, names: Names) -> Mapping[str, StoredWeight]:
        return {f"{name}.weight": self._stored(name, shape) for name, shape in _shapes(self._model).items()}

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that every step reads: all except the embedding."""
        shapes = _shapes(self._model)
        return sum(self._make(name, shape, META).nbytes for name, shape in shapes.items() if name != "token_embd")

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        nbytes = self._make(name, shape, META).nbytes
        make = partial(self._make, name, shape, self._device)
        return StoredWeight(name, nbytes, self._kind(name), make, partial(self._make, name, (2, 256), META), shape)

    def _kind(self, name: str) -> str:
        return kind_in_mix(name, self._model.layers) if self._mix == Q4_K_M else self._mix

    def _make(self, name: str, shape: tuple[int, ...], device: torch.device) -> QTensor:
        if len(shape) == 1:
            return PlainTensor(shape, "F32", torch.ones(shape))
        rows, columns = shape
        return weight(self._kind(name), rows, columns, device)

    def close(self) -> None:
        """Do nothing, because no file is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by its GGUF name."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (model.vocab_size, model.hidden)}
    for number in range(model.layers):
        layer = f"blk.{number}."
        shapes |= {f"{layer}attn_norm": (model.hidden,), f"{layer}ffn_norm": (model.hidden,)}
        shapes |= {f"{layer}attn_{it}": (width, model.hidden) for it, width in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{layer}attn_output": (model.hidden, q), f"{layer}ffn_down": (model.hidden, model.mlp_hidden)}
        shapes |= {f"{layer}ffn_{it}": (model.mlp_hidden, model.hidden) for it in ("gate", "up")}
    return shapes | {"output_norm": (model.hidden,), "output": (model.vocab_size, model.hidden)}
