"""The seam between the engine and what computes: where weights and caches lie, and which kernels run.

A device loads a model once and gives a function that computes batches. Chosen by `backends.device_choice`; the runner
knows nothing else of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.batch import Batch
from engine.checkpoints.checkpoint import StoredWeight
from engine.checkpoints.weights import Weights
from engine.config import EngineConfig, GroupConfig, ModelConfig
from engine.kv.cache import KVCache
from engine.sampling.drawing import Logits
from engine.step import Runner


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a model takes on a device besides its caches, as far as its headers tell."""

    weights: int  # once they are loaded
    steps: int  # what steps compute with, and what is prepared for them

    @property
    def total(self) -> int:
        return self.weights + self.steps


Compute = Callable[[Batch], Logits]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on a device, ready to compute."""

    compute: Compute
    kv: KVCache


class Device(Protocol):
    """One kind of hardware with the kernels of one backend."""

    @property
    def name(self) -> str:
        """Of the backend."""
        ...

    @property
    def threads(self) -> int:
        """How many compute."""
        ...

    @property
    def numerics(self) -> tuple[str, ...]:
        """What the bits of keys and values depend on besides model and tokens."""
        ...

    @property
    def kv_type(self) -> torch.dtype: ...

    @property
    def max_running(self) -> int:
        """Requests that may hold blocks at the same time."""
        ...

    @property
    def contexts(self) -> int:
        """Of how many whole contexts pools may hold the tokens, where memory has room for that."""
        ...

    @property
    def host_cache(self) -> int:
        """Bytes of the host pool, where nobody says: a device that computes in the host's memory needs none."""
        ...

    @property
    def step_depth(self) -> int:
        """Steps that are launched before the first of them is collected."""
        ...

    def layer_shape(self, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Of one layer of one KV block, in elements of `kv_type`. Raises UnsupportedModel."""
        ...

    def step_tokens(self, model: ModelConfig) -> int:
        """The token budget of one step: whoever wants to stop or to join waits for the step under way."""
        ...

    def free_memory(self) -> int:
        """Bytes that a model may take here, in all."""
        ...

    def needs(self, model: ModelConfig, stored: Mapping[str, StoredWeight]) -> Needs:
        """What these weights, of which nothing has been read, will take."""
        ...

    def kv_memory(self, model: ModelConfig, weight_bytes: int) -> int:
        """Bytes that are there for caches, once weights of about so many bytes are loaded. Raises
        OutOfMemory where these alone do not fit."""
        ...

    def load(self, model: ModelConfig, weights: Weights, config: EngineConfig) -> LoadedModel:
        """Take the model's weights, reserve its caches: pools as the configuration has them, or of whatever size turns
        out to fit. Raises UnsupportedModel, ModelFileError or OutOfMemory."""
        ...

    def runner(self, loaded: LoadedModel, vocab_size: int, groups: Sequence[GroupConfig]) -> Runner[Any]:
        """What runs plans on it."""
        ...
