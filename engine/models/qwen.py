"""The dense Qwen families: Qwen 2 and 2.5 with q, k, v biases (arXiv:2407.10671), Qwen 3 with head norms
(arXiv:2505.09388).

Architectures: `qwen2`, which distilled DeepSeek-R1 models also use, and `qwen3`.
"""

from dataclasses import replace

from engine.checkpoints.metadata import Key, Metadata
from engine.config import HeadNorm, LayerConfig, ModelConfig
from engine.models.decoder_config import NAMES, read_decoder, read_layout

__all__ = ["NAMES", "read_config"]

SHARED: dict[str, object] = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}
DEFAULTS: dict[str, dict[str, object]] = {
    "qwen2": SHARED,
    "qwen3": SHARED | {"head_dim": 128},
}
USE_WINDOW = Key("", "use_sliding_window")
FULL_LAYERS = Key("", "max_window_layers")  # despite its name, the number of leading layers without a window


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS[metadata.architecture])
    config = read_decoder(metadata)
    if metadata.architecture == "qwen2":
        config = replace(config, qkv_bias=True, out_bias=False)
    else:
        config = replace(config, head_norm=HeadNorm.EACH)
    return replace(config, layout=_layout(metadata, config))


def _layout(metadata: Metadata, config: ModelConfig) -> tuple[LayerConfig, ...]:
    if not metadata.flag(USE_WINDOW, False):
        return ()
    first = metadata.integer(FULL_LAYERS, 28, minimum=0)
    return read_layout(metadata, config, [number >= first for number in range(config.layers)])
