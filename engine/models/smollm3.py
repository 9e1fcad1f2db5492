"""The SmolLM3 family: Llama's layers, of which some do not turn (NoPE, arXiv:2501.18795).

In GGUF files rotary pairs are neighbours, as Llama's, and every fourth layer does not turn.
"""

from dataclasses import replace

from engine.checkpoints.metadata import Key, Metadata
from engine.config import LayerConfig, ModelConfig
from engine.errors import UnsupportedModel
from engine.models.decoder_config import NAMES, every, read_decoder, read_layout

__all__ = ["NAMES", "read_config"]

DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
}
TURNS = Key("", "no_rope_layers")  # 1: the layer turns, whatever the name says
INTERVAL = Key("", "no_rope_layer_interval")
USE_WINDOW = Key("", "use_sliding_window")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS)
    config = read_decoder(metadata, interleaved=True)
    turns = _turning_layers(metadata, config.layers)
    layers = _windows(metadata, config, turns)
    return replace(
        config,
        layout=tuple(replace(layer, rope=0 if turn else None) for layer, turn in zip(layers, turns, strict=True)),
    )


def _turning_layers(metadata: Metadata, layers: int) -> list[bool]:
    listed = metadata.items(TURNS, int) if metadata.is_config else None
    if listed is None:
        return every(metadata.integer(INTERVAL, 4), layers)
    if len(listed) != layers or not {0, 1}.issuperset(listed):
        raise UnsupportedModel(f"{TURNS.config} is {listed!r:.60}, and must be 0 or 1 for each of {layers} layers")
    return [turn == 1 for turn in listed]


def _windows(metadata: Metadata, config: ModelConfig, turns: list[bool]) -> tuple[LayerConfig, ...]:
    if not metadata.flag(USE_WINDOW, False):
        return tuple(LayerConfig() for _ in turns)
    return read_layout(metadata, config, [not turn for turn in turns])
