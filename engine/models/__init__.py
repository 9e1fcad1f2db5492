"""Model families, one file each, and the table from a checkpoint's architecture to its file.

A family's module has `read_config(Metadata) -> ModelConfig` and a class `Model` whose `load` classmethod takes every
tensor it needs from the weights, and whose `forward(batch, kv)` gives logits.
"""

import importlib
from typing import Protocol

from engine.batch import Batch
from engine.checkpoint_config import Metadata
from engine.config import ModelConfig
from engine.errors import UnsupportedModel
from engine.kv_cache import KVCache, KVGroup
from engine.operations import Activation, Operations
from engine.weights import GGUFWeights

FAMILIES = {"llama": "engine.models.llama"}  # general.architecture -> module


class Model(Protocol):
    """A loaded decoder."""

    config: ModelConfig

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The groups of the KV cache that `forward` expects."""
        ...

    def forward(self, batch: Batch, kv: KVCache) -> Activation:
        """Compute the batch's tokens, store their keys and values in `kv`; logits float32 [logit rows, vocabulary].

        On a backend that records, it is called once, and what it does is repeated for every batch.
        """
        ...


def read_config(metadata: Metadata) -> ModelConfig:
    """The model's shape. Raises UnsupportedModel for an unknown architecture or an odd value, by name."""
    config: ModelConfig = _family(metadata.architecture).read_config(metadata)
    return config


def load(config: ModelConfig, weights: GGUFWeights, operations: Operations, context_length: int) -> Model:
    """The model over all tensors of `weights`, ready for positions below `context_length`."""
    model: Model = _family(config.architecture).Model.load(config, weights, operations, context_length)
    weights.finish()
    return model


def _family(architecture: str):  # type: ignore[no-untyped-def]  # modules are typed by what they are used for
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"Models of architecture {architecture!r} are not supported by this version",
            f"Architectures that are: {', '.join(FAMILIES)}.",
        )
    return importlib.import_module(FAMILIES[architecture])
