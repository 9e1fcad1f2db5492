"""Device: the interface to one kind of hardware, its memory, and its kernels.

A device loads a model once and returns a function that computes batches. `backends.device_choice` chooses the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.batch import Batch
from engine.checkpoints.checkpoint import StoredWeight
from engine.checkpoints.weights import Weights
from engine.config import EngineConfig, GroupConfig
from engine.kv.cache import KVCache, LayerBlock
from engine.mixer_config import CacheConfig
from engine.model_config import ModelConfig
from engine.sampling.drawing import Logits
from engine.step import Runner


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory in bytes that a model needs on a device in addition to its caches.

    It is estimated from the checkpoint's headers.
    """

    weights: int  # bytes of the weights after loading
    steps: int  # bytes of the buffers that steps use, and of the structures prepared for steps
    loading: int = 0  # bytes that loading needs besides the weights, and frees before caches are written

    @property
    def total(self) -> int:
        return self.weights + self.steps


Compute = Callable[[Batch], Logits]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on a device, ready to compute."""

    compute: Compute
    kv: KVCache
    synchronize: Callable[[], None] = lambda: None  # wait for the device; an error means that it has stopped working
    # stop the threads and free the device's memory; called once, after the last reference to the model was dropped
    close: Callable[[], None] = lambda: None


class Device(Protocol):
    """One kind of hardware with the kernels of one backend."""

    @property
    def name(self) -> str:
        """Name of the backend."""
        ...

    @property
    def threads(self) -> int:
        """Number of compute threads."""
        ...

    @property
    def numerics(self) -> tuple[str, ...]:
        """Identifiers of everything that affects the bits of keys and values, except the model and the tokens."""
        ...

    @property
    def kv_type(self) -> torch.dtype:
        """Type of the elements of keys and values."""
        ...

    @property
    def max_running(self) -> int:
        """Maximum number of requests that hold blocks at the same time."""
        ...

    @property
    def max_logit_rows(self) -> int:
        """Maximum rows of logits in one step that reports log-probabilities of prompts; 0: unlimited."""
        ...

    @property
    def contexts(self) -> int:
        """Number of full contexts that the pools should hold, if there is enough memory."""
        ...

    @property
    def kv_share(self) -> float:
        """Share of `kv_memory` that caches take unless the context needs more. 1: all of it."""
        ...

    @property
    def step_depth(self) -> int:
        """Maximum number of steps that are launched before the first of them is collected."""
        ...

    def layer_block(self, cache: CacheConfig) -> LayerBlock:
        """Return the shape and the type of one layer's part of a block. Raises UnsupportedModel."""
        ...

    def step_tokens(self, model: ModelConfig) -> int:
        """Return the token budget of one step, which bounds how long an abort or a new request waits for the step to
        end.
        """
        ...

    def free_memory(self) -> int:
        """Return the number of bytes that a model may use on this device."""
        ...

    def host_pool(self, weights: int) -> int:
        """Return the size of the host pools in bytes. Devices that compute in the host's memory need none.

        `weights`: bytes of the weights that stay in the host's memory. Raises OutOfMemory if they do not fit.
        """
        ...

    def needs(self, model: ModelConfig, stored: Mapping[str, StoredWeight]) -> Needs:
        """Return the memory that a model with these weights will need. Does not read the weights."""
        ...

    def weight_bytes(self, stored: Mapping[str, StoredWeight]) -> int:
        """Return the size of the weights that the device's memory will hold: in the files, or as loaded if known."""
        ...

    def kv_memory(self, model: ModelConfig, weight_bytes: int) -> int:
        """Return the number of bytes that caches may use in addition to `weight_bytes` bytes of weights.

        Raises OutOfMemory if the weights alone do not fit.
        """
        ...

    def load(
        self, model: ModelConfig, weights: Weights, config: EngineConfig, pools: Sequence[Tensor] = ()
    ) -> LoadedModel:
        """Load the model's weights and reserve its caches. Pools have the configured size, or as many blocks as fit.

        `pools`: the pools of an earlier engine with this configuration, on devices that compute in the host's memory.
        Raises UnsupportedModel, ModelFileError, or OutOfMemory.
        """
        ...

    def runner(self, loaded: LoadedModel, vocab_size: int, groups: Sequence[GroupConfig]) -> Runner[Any]:
        """Return the runner that executes step plans on this device."""
        ...
