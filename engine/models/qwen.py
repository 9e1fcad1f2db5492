"""The Qwen families: Qwen 2 and 2.5 with q, k, v biases (arXiv:2407.10671), Qwen 3 with head norms (arXiv:2505.09388).

Architectures: `qwen2`, which distilled DeepSeek-R1 models also use, and `qwen3`; with mixtures of experts `qwen2_moe`
and `qwen3_moe`, which GGUF files call `qwen2moe` and `qwen3moe`.
"""

from dataclasses import replace

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.config import HeadNorm, LayerConfig, ModelConfig
from engine.models.decoder_config import IGNORED, STEMS, read_decoder, read_layout
from engine.models.expert_config import ExpertKeys, read_experts, with_experts

MLP = "model.layers.{}.mlp."
NAMES = Names(
    STEMS
    | {
        "blk.{}.ffn_gate_inp": f"{MLP}gate",
        "blk.{}.ffn_gate.{e}": f"{MLP}experts.{{e}}.gate_proj",
        "blk.{}.ffn_up.{e}": f"{MLP}experts.{{e}}.up_proj",
        "blk.{}.ffn_down.{e}": f"{MLP}experts.{{e}}.down_proj",
        "blk.{}.ffn_gate_inp_shexp": f"{MLP}shared_expert_gate",
        "blk.{}.ffn_gate_shexp": f"{MLP}shared_expert.gate_proj",
        "blk.{}.ffn_up_shexp": f"{MLP}shared_expert.up_proj",
        "blk.{}.ffn_down_shexp": f"{MLP}shared_expert.down_proj",
    },
    IGNORED,
    whole={
        "blk.{}.ffn_gate_up.{e}.weight": f"{MLP}experts.gate_up_proj",
        "blk.{}.ffn_down.{e}.weight": f"{MLP}experts.down_proj",
    },
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
    "qwen2moe": SHARED,
    "qwen3moe": SHARED,
}
EXPERTS = ExpertKeys(shared_hidden="shared_expert_intermediate_size")
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
    config = replace(config, layout=_layout(metadata, config))
    return replace(config, layout=_expert_layers(metadata, config, is_qwen2)) if has_experts else config


def _layout(metadata: Metadata, config: ModelConfig) -> tuple[LayerConfig, ...]:
    if not metadata.flag(USE_WINDOW, False):
        return ()
    first = metadata.integer(FULL_LAYERS, 28, minimum=0)
    return read_layout(metadata, config, [number >= first for number in range(config.layers)])


def _expert_layers(metadata: Metadata, config: ModelConfig, is_qwen2: bool) -> tuple[LayerConfig, ...]:
    normalized = not metadata.is_config and not is_qwen2
    experts = read_experts(metadata, config, EXPERTS, normalized=normalized)
    dense = metadata.items(DENSE_LAYERS, int) or ()
    step = metadata.integer(SPARSE_STEP, 1)
    has_experts = [number not in dense and (number + 1) % step == 0 for number in range(config.layers)]
    return with_experts(config, replace(experts, shared_gate=is_qwen2), has_experts)
