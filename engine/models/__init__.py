"""Model families, one module each, and the table that maps a checkpoint's architecture to its module.

A family's module has `read_config(Metadata) -> ModelConfig` and `NAMES`, the names of its weights in transformers
checkpoints. All families use the same `Decoder`.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from engine.checkpoints.checkpoint import Checkpoint, Names, StoredWeight
from engine.checkpoints.metadata import Metadata
from engine.errors import UnsupportedModel
from engine.model_config import ModelConfig

if TYPE_CHECKING:
    from engine.checkpoints.weights import Weights
    from engine.kv.cache import KVCache
    from engine.operations import Activation, Inputs, Operations

FAMILIES = {  # general.architecture of a GGUF file, or model_type of a config.json -> module
    "llama": "engine.models.llama",
    "mixtral": "engine.models.llama",
    "mistral": "engine.models.mistral",
    "ministral": "engine.models.mistral",
    "ministral3": "engine.models.mistral",
    "mistral3": "engine.models.mistral",
    "qwen2": "engine.models.qwen",
    "qwen3": "engine.models.qwen",
    "qwen2moe": "engine.models.qwen",
    "qwen2_moe": "engine.models.qwen",
    "qwen3moe": "engine.models.qwen",
    "qwen3_moe": "engine.models.qwen",
    "qwen3next": "engine.models.qwen3_next",
    "qwen3_next": "engine.models.qwen3_next",
    "qwen35": "engine.models.qwen35",
    "qwen35moe": "engine.models.qwen35",
    "qwen3_5": "engine.models.qwen35",
    "qwen3_5_text": "engine.models.qwen35",
    "qwen3_5_moe": "engine.models.qwen35",
    "qwen3_5_moe_text": "engine.models.qwen35",
    "gemma2": "engine.models.gemma",
    "gemma3": "engine.models.gemma",
    "gemma3_text": "engine.models.gemma",
    "gemma4": "engine.models.gemma4",
    "gemma4_text": "engine.models.gemma4",
    "phi3": "engine.models.phi3",
    "granite": "engine.models.granite",
    "granitemoe": "engine.models.granite",
    "granitemoeshared": "engine.models.granite",
    "olmo2": "engine.models.olmo",
    "olmo3": "engine.models.olmo",
    "olmoe": "engine.models.olmo",
    "smollm3": "engine.models.smollm3",
    "cohere": "engine.models.cohere",
    "command-r": "engine.models.cohere",
    "stablelm": "engine.models.stablelm",
    "glm4moe": "engine.models.glm",
    "glm4_moe": "engine.models.glm",
    "ernie4_5-moe": "engine.models.ernie",
    "ernie4_5_moe": "engine.models.ernie",
    "lfm2": "engine.models.lfm2",
    "lfm2moe": "engine.models.lfm2",
    "lfm2_moe": "engine.models.lfm2",
    "minimax-m2": "engine.models.minimax",
    "minimax_m2": "engine.models.minimax",
    "gpt-oss": "engine.models.gpt_oss",
    "gpt_oss": "engine.models.gpt_oss",
}
ENCODERS = {"bert": "engine.models.bert"}  # architectures of embedding models: see `engine.embedding.loading`


class Model(Protocol):
    """The interface of a loaded decoder."""

    config: ModelConfig

    def forward(self, batch: "Inputs", kv: "KVCache") -> "Activation":
        """Compute a batch and store its keys and values in `kv`. Returns logits, float32 [logit rows, vocabulary].

        A backend that records operations calls this once, and replays the recording for every batch.
        """
        ...


class Family(Protocol):
    """The interface of a family's module."""

    NAMES: Names

    def read_config(self, metadata: Metadata) -> ModelConfig: ...


def read_config(metadata: Metadata) -> ModelConfig:
    """Return the model's configuration.

    Raises UnsupportedModel for an unknown architecture or an unsupported value, which the error names.
    """
    return _family(metadata.architecture).read_config(metadata)


def check_config(metadata: Metadata) -> ModelConfig | None:
    """Return the decoder's configuration, or None if the model is an encoder.

    Raises UnsupportedModel, as loading would, if this version does not support the configuration.
    """
    if metadata.architecture in ENCODERS:
        importlib.import_module(ENCODERS[metadata.architecture]).read_config(metadata)
        return None
    return read_config(metadata)


def stored_weights(checkpoint: Checkpoint) -> Mapping[str, StoredWeight]:
    """Return the checkpoint's weights by their GGUF names, without those that the decoder does not need.

    Raises UnsupportedModel, ModelFileError, or UnsupportedQuantization.
    """
    names = _family(checkpoint.metadata.architecture).NAMES
    names = replace(names, ignored=ignored_tensors(checkpoint.metadata))
    stored = checkpoint.weights(names)
    if "token_embd.weight" in stored:
        return stored
    # The stems of checkpoints without a head, such as those of embedding models, lack the common prefix "model.".
    stems = {ours: theirs.removeprefix("model.") for ours, theirs in names.stems.items()}
    whole = {theirs.removeprefix("model."): ours for theirs, ours in names.whole.items()}
    return checkpoint.weights(replace(names, stems=stems, whole=whole))


def ignored_tensors(metadata: Metadata) -> re.Pattern[str]:
    """Return the pattern of the tensors that the decoder does not need, such as those of its draft layers.

    It matches names of transformers checkpoints and of GGUF files. Raises UnsupportedModel.
    """
    ignored, config = _family(metadata.architecture).NAMES.ignored, read_config(metadata)
    numbers = "|".join(str(len(config.layers) + number) for number in range(config.draft_layers))
    return re.compile(rf"{ignored.pattern}|(?:blk|(?:model\.)?layers)\.(?:{numbers})\..+") if numbers else ignored


def load(config: ModelConfig, weights: "Weights", operations: "Operations", context_length: int) -> Model:
    """Load a model for positions below `context_length`. The model takes all tensors of `weights`."""
    # a local import, because it imports torch, which reading a configuration does not need
    from engine.models.decoder_loader import load_decoder

    model = load_decoder(config, weights, operations, context_length)
    weights.finish()
    return model


def _family(architecture: str) -> Family:
    if architecture in ENCODERS:
        raise UnsupportedModel(
            f"Models of architecture {architecture!r} return embeddings and cannot generate text",
            "Serve it with ingle serve, and use POST /v1/embeddings; or choose a model that generates text.",
        )
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"Models of architecture {architecture!r} are not supported by this version",
            f"Supported architectures: {', '.join(FAMILIES)}.",
        )
    family: Family = importlib.import_module(FAMILIES[architecture])
    return family
