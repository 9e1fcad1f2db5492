"""The SmolLM3 family: Llama's layers, some of which have no rotary embedding (NoPE, arXiv:2501.18795).

In GGUF files rotary pairs are adjacent elements, as for Llama, and every fourth layer has no rotary embedding.
"""

from dataclasses import replace

from engine.checkpoints.metadata import Key, Metadata
from engine.errors import UnsupportedModel
from engine.mixer_config import AttentionConfig
from engine.model_config import ModelConfig
from engine.models.decoder_config import NAMES, all_but_every, read_decoder, with_windows

__all__ = ["NAMES", "read_config"]

DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
}
ROPE_LAYERS = Key("", "no_rope_layers")  # despite the key's name, 1 marks a layer with rotary embedding
INTERVAL = Key("", "no_rope_layer_interval")
USE_WINDOW = Key("", "use_sliding_window")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS)
    config = read_decoder(metadata, interleaved=True)
    has_rope = _rope_layers(metadata, len(config.layers))
    if metadata.flag(USE_WINDOW, False):
        config = with_windows(metadata, config, [not rope for rope in has_rope])
    layers = zip(config.layers, has_rope, strict=True)
    return replace(config, layers=tuple(it if rope else it.with_attention(_without_rope) for it, rope in layers))


def _without_rope(attention: AttentionConfig) -> AttentionConfig:
    return replace(attention, rope=None)


def _rope_layers(metadata: Metadata, layers: int) -> list[bool]:
    listed = metadata.items(ROPE_LAYERS, int) if metadata.is_config else None
    if listed is None:
        return all_but_every(metadata.integer(INTERVAL, 4), layers)
    if len(listed) != layers or not {0, 1}.issuperset(listed):
        raise UnsupportedModel(
            f"{ROPE_LAYERS.config} is {listed!r:.60}, but must be 0 or 1 for each of {layers} layers"
        )
    return [rope == 1 for rope in listed]
