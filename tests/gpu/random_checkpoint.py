"""A checkpoint with random weights that are made on the device that uses them. No file is read."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Self

import torch

from engine.checkpoints.checkpoint import Names, StoredWeight
from engine.checkpoints.metadata import Metadata
from engine.model_config import ExpertConfig, MLPConfig, ModelConfig
from quant.tensor import PlainTensor, QTensor
from tests.kernels.shapes import mixer_of
from tests.kernels.weights import weight
from tests.support.weight_mixes import Q4_K_M, kind_in_mix

META = torch.device("meta")


class RandomCheckpoint:
    """A Llama checkpoint, or a Qwen 3 checkpoint with experts; implements `engine.checkpoints.checkpoint.Checkpoint`.

    `mix`: a kind of weights for all matrices, or Q4_K_M.
    """

    path = Path("random weights")

    def __init__(self, model: ModelConfig, mix: str, device: torch.device) -> None:
        self.digest = f"{mix} {model!r}"
        self._model, self._mix, self._device = model, mix, device

    @property
    def metadata(self) -> Metadata:
        model, mixer, mlp = self._model, mixer_of(self._model), self._model.layers[0].mlp
        values = {
            "num_hidden_layers": len(model.layers),
            "hidden_size": model.hidden,
            "num_attention_heads": mixer.heads,
            "num_key_value_heads": mixer.kv_heads,
            "head_dim": mixer.head_dim,
            "intermediate_size": mlp.hidden,
            "vocab_size": model.vocab_size,
            "max_position_embeddings": model.context_length,
            "rms_norm_eps": model.norm.epsilon,
            "rope_theta": model.ropes[0].base,
        }
        if isinstance(mlp, MLPConfig):
            return Metadata(values, "llama", is_config=True)
        values |= {
            "num_experts": mlp.routing.experts,
            "num_experts_per_tok": mlp.routing.active,
            "moe_intermediate_size": mlp.hidden,
            "norm_topk_prob": mlp.routing.normalized,
        }
        return Metadata(values, "qwen3_moe", is_config=True)

    def weights(self, names: Names) -> Mapping[str, StoredWeight]:
        return {f"{name}.weight": self._stored(name, shape) for name, shape in _shapes(self._model).items()}

    def bytes_per_step(self, tokens: int = 1) -> int:
        """Bytes of weights that a step reads: all except the embedding, and of experts those in use.

        Experts are in use with equal probability.
        """
        shapes = {name: shape for name, shape in _shapes(self._model).items() if name != "token_embd"}
        experts = {name for name in shapes if name.rpartition(".")[2].isdigit()}
        sizes = {name: self._make(name, shape, META).nbytes for name, shape in shapes.items()}
        used = sum(sizes[name] for name in experts) * _share_in_use(self._model, tokens)
        return sum(size for name, size in sizes.items() if name not in experts) + round(used)

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        nbytes = self._make(name, shape, META).nbytes
        make = partial(self._make, name, shape, self._device)
        return StoredWeight(name, nbytes, self._kind(name), make, partial(self._make, name, (2, 256), META), shape)

    def _kind(self, name: str) -> str:
        if name.endswith("ffn_gate_inp"):
            return "F32"
        return kind_in_mix(name.rstrip(".0123456789"), len(self._model.layers)) if self._mix == Q4_K_M else self._mix

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
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (model.vocab_size, model.hidden)}
    for number, config in enumerate(model.layers):
        layer, mixer, mlp = f"blk.{number}.", model.attention, config.mlp
        q, kv = mixer.width, mixer.kv_width
        shapes |= {f"{layer}attn_norm": (model.hidden,), f"{layer}ffn_norm": (model.hidden,)}
        shapes |= {f"{layer}attn_{it}": (width, model.hidden) for it, width in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{layer}attn_output": (model.hidden, q)}
        if model.head_norm:
            shapes |= {f"{layer}attn_{it}_norm": (mixer.head_dim,) for it in "qk"}
        suffixes = [""]
        if isinstance(mlp, ExpertConfig):
            shapes[f"{layer}ffn_gate_inp"] = mlp.routing.experts, model.hidden
            suffixes = [f".{it}" for it in range(mlp.routing.experts)]
        for suffix in suffixes:
            shapes |= {f"{layer}ffn_{it}{suffix}": (mlp.hidden, model.hidden) for it in ("gate", "up")}
            shapes[f"{layer}ffn_down{suffix}"] = model.hidden, mlp.hidden
    return shapes | {"output_norm": (model.hidden,), "output": (model.vocab_size, model.hidden)}


def _share_in_use(model: ModelConfig, tokens: int) -> float:
    """Return the expected share of the experts that at least one of the tokens uses."""
    mlp = model.layers[0].mlp
    return 1 - (1 - mlp.active / mlp.routing.experts) ** tokens if isinstance(mlp, ExpertConfig) else 0.0
