"""Model families, one file each, and the table from a checkpoint's architecture to its file.

A family's module has `read_config(Metadata) -> ModelConfig` and `NAMES`, what checkpoints of transformers call its
weights. All are a `Decoder`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from engine.checkpoints.checkpoint import Checkpoint, Names, StoredWeight
from engine.checkpoints.metadata import Metadata
from engine.config import ModelConfig
from engine.errors import UnsupportedModel

if TYPE_CHECKING:
    from engine.checkpoints.weights import Weights
    from engine.kv.cache import KVCache, KVGroup
    from engine.operations import Activation, Inputs, Operations

FAMILIES = {  # general.architecture of a GGUF file, or model_type of a config.json -> module
    "llama": "engine.models.llama",
    "mistral": "engine.models.mistral",
    "ministral": "engine.models.mistral",
    "ministral3": "engine.models.mistral",
    "mistral3": "engine.models.mistral",
    "qwen2": "engine.models.qwen",
    "qwen3": "engine.models.qwen",
    "gemma2": "engine.models.gemma",
    "gemma3": "engine.models.gemma",
    "gemma3_text": "engine.models.gemma",
    "phi3": "engine.models.phi3",
    "granite": "engine.models.granite",
    "olmo2": "engine.models.olmo",
    "olmo3": "engine.models.olmo",
    "smollm3": "engine.models.smollm3",
    "cohere": "engine.models.cohere",
    "command-r": "engine.models.cohere",
    "stablelm": "engine.models.stablelm",
}
ENCODERS = {"bert": "engine.models.bert"}  # of those that give embeddings: see `engine.embedding.loading`


class Model(Protocol):
    """A loaded decoder."""

    config: ModelConfig

    def kv_groups(self) -> "tuple[KVGroup, ...]":
        """The groups of the KV cache that `forward` expects."""
        ...

    def forward(self, batch: "Inputs", kv: "KVCache") -> "Activation":
        """Compute the batch's tokens, store their keys and values in `kv`; logits float32 [logit rows, vocabulary].

        On a backend that records, it is called once, and what it does is repeated for every batch.
        """
        ...


class Family(Protocol):
    """A family's module."""

    NAMES: Names

    def read_config(self, metadata: Metadata) -> ModelConfig: ...


def read_config(metadata: Metadata) -> ModelConfig:
    """The model's shape. Raises UnsupportedModel for an unknown architecture or an odd value, by name."""
    return _family(metadata.architecture).read_config(metadata)


def check_config(metadata: Metadata) -> None:
    """Raise UnsupportedModel, as loading would, for a model whose configuration this version does not run."""
    if metadata.architecture in ENCODERS:
        importlib.import_module(ENCODERS[metadata.architecture]).read_config(metadata)
    else:
        read_config(metadata)


def stored_weights(checkpoint: Checkpoint) -> Mapping[str, StoredWeight]:
    """The checkpoint's weights by our names. Raises UnsupportedModel, ModelFileError or UnsupportedQuantization."""
    names = _family(checkpoint.metadata.architecture).NAMES
    stored = checkpoint.weights(names)
    if "token_embd.weight" in stored:
        return stored
    # Checkpoints without a head, as of models that give embeddings, leave out the component that all others share.
    stems = {ours: theirs.removeprefix("model.") for ours, theirs in names.stems.items()}
    return checkpoint.weights(replace(names, stems=stems))


def load(config: ModelConfig, weights: "Weights", operations: "Operations", context_length: int) -> Model:
    """The model over all tensors of `weights`, ready for positions below `context_length`."""
    from engine.models.decoder import Decoder  # loads torch, which those who read a configuration do not need

    model = Decoder.load(config, weights, operations, context_length)
    weights.finish()
    return model


def _family(architecture: str) -> Family:
    if architecture in ENCODERS:
        raise UnsupportedModel(
            f"Models of architecture {architecture!r} give embeddings, and cannot chat",
            "Serve it with ingle serve, and use POST /v1/embeddings; or choose a model that writes text.",
        )
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"Models of architecture {architecture!r} are not supported by this version",
            f"Architectures that are: {', '.join(FAMILIES)}.",
        )
    family: Family = importlib.import_module(FAMILIES[architecture])
    return family
