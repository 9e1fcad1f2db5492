"""The Qwen families: Qwen 2 and 2.5 with q, k, v biases (arXiv:2407.10671), Qwen 3 with head norms (arXiv:2505.09388).

Architectures: `qwen2`, which distilled DeepSeek-R1 models also use, and `qwen3`; with mixtures of experts `qwen2_moe`
and `qwen3_moe`, which GGUF files call `qwen2moe` and `qwen3moe`.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.model_config import HeadNorm, ModelConfig
from engine.models.decoder_config import IGNORED, STEMS, read_decoder, with_windows
from engine.models.expert_config import EXPERT_STEMS, STACKED, ExpertKeys, read_experts, with_experts

MLP = "model.layers.{}.mlp."
NAMES = Names(
    STEMS
    | EXPERT_STEMS
    | {
        "blk.{}.ffn_gate_inp_shexp": f"{MLP}shared_expert_gate",
        "blk.{}.ffn_gate_shexp": f"{MLP}shared_expert.gate_proj",
        "blk.{}.ffn_up_shexp": f"{MLP}shared_expert.up_proj",
        "blk.{}.ffn_down_shexp": f"{MLP}shared_expert.down_proj",
    },
    IGNORED,
    whole=STACKED,
)

SHARED: dict[str, object] = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}
DEFAULTS: dict[str, dict[str, object]] = {
    "qwen2": SHARED,
    "qwen3": SHARED | {"head_dim": 128},
    "qwen2moe": SHARED
    | {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    | {"shared_expert_intermediate_size": 5632},
    "qwen3moe": SHARED
    | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
EXPERTS = ExpertKeys(
    hidden="moe_intermediate_size",
    normalized="norm_topk_prob",
    shared_hidden="shared_expert_intermediate_size",
)
DENSE_LAYERS = Key("", "mlp_only_layers")
SPARSE_STEP = Key("", "decoder_sparse_step")
QKV_BIAS = Key("", "qkv_bias")
USE_WINDOW = Key("", "use_sliding_window")
FULL_LAYERS = Key("", "max_window_layers")  # despite its name, the number of leading layers without a window


def read_config(metadata: Metadata) -> ModelConfig:
    architecture = metadata.architecture.replace("_moe", "moe")
    metadata = metadata.with_defaults(DEFAULTS[architecture])
    has_experts, is_qwen2 = architecture.endswith("moe"), architecture.startswith("qwen2")
    config = read_decoder(metadata, experts=has_experts)
    if is_qwen2:
        config = replace(config, qkv_bias=metadata.flag(QKV_BIAS, True), out_bias=False)
    else:
        config = replace(config, head_norm=HeadNorm.EACH)
    if metadata.flag(USE_WINDOW, False):
        config = with_windows(metadata, config, _slides(metadata, len(config.layers), architecture))
    return _with_experts(metadata, config, is_qwen2) if has_experts else config


def _slides(metadata: Metadata, layers: int, architecture: str) -> Sequence[bool]:
    """Return whether each layer has a window, if the checkpoint does not list its layers."""
    first = metadata.integer(FULL_LAYERS, 28, minimum=0)
    if architecture == "qwen3moe":
        return [True] * layers
    if architecture == "qwen2moe":  # here the key is the number of leading layers of which every other has a window
        return [number < first and number % 2 == 0 for number in range(layers)]
    return [number >= first for number in range(layers)]


def _with_experts(metadata: Metadata, config: ModelConfig, is_qwen2: bool) -> ModelConfig:
    normalized = not metadata.is_config and not is_qwen2  # GGUF files do not store it
    experts = read_experts(metadata, config, EXPERTS, normalized=normalized)
    return with_experts(config, replace(experts, shared_gate=is_qwen2), layers_with_experts(metadata, config))


def layers_with_experts(metadata: Metadata, config: ModelConfig) -> list[bool]:
    """Return for each layer whether it has experts. GGUF files do not store it: there all layers have them."""
    dense = metadata.items(DENSE_LAYERS, int) or ()
    step = metadata.integer(SPARSE_STEP, 1)
    return [number not in dense and (number + 1) % step == 0 for number in range(len(config.layers))]
