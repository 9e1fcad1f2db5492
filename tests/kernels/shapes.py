"""Shapes of real models. Kernels are compiled and measured for them."""

from dataclasses import replace

from engine.mixer_config import AttentionConfig, CacheConfig, DeltaConfig
from engine.model_config import (
    ExpertConfig,
    Gate,
    HeadNorm,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    NormRule,
    RopeConfig,
    Routing,
)


def _rope(dimensions: int) -> tuple[RopeConfig, ...]:
    return (RopeConfig(base=500000.0, dimensions=dimensions, interleaved=False),)


def layer(heads: int, kv_heads: int, head_dim: int, mlp: int | ExpertConfig, window: int | None = None) -> LayerConfig:
    """Return a layer with a dense MLP of width `mlp`, or with experts."""
    mixer = AttentionConfig(heads, CacheConfig(kv_heads, head_dim, window))
    return LayerConfig(mixer, MLPConfig(mlp) if isinstance(mlp, int) else mlp)


LLAMA_8B = ModelConfig(
    architecture="llama",
    layers=(layer(32, 8, 128, 14336),) * 32,
    hidden=4096,
    vocab_size=128256,
    context_length=131072,
    norm=NormRule(1e-5),
    ropes=_rope(128),
)
QWEN_32B = ModelConfig(
    architecture="qwen3",
    layers=(layer(64, 8, 128, 25600),) * 64,
    hidden=5120,
    vocab_size=151936,
    context_length=40960,
    norm=NormRule(1e-6),
    ropes=_rope(128),
    head_norm=HeadNorm.EACH,
)
GEMMA_9B = ModelConfig(
    architecture="gemma2",
    layers=tuple(layer(16, 8, 256, 14336, None if number % 2 else 4096) for number in range(42)),
    hidden=3584,
    vocab_size=256000,
    context_length=8192,
    norm=NormRule(1e-6),
    ropes=_rope(256),
    attention_softcap=50.0,
    logit_softcap=30.0,
    gate=Gate.GELU,
)
SMALL_135M = ModelConfig(  # SmolLM2 with an odd vocabulary size, as some models have
    architecture="llama",
    layers=(layer(9, 3, 64, 1536),) * 30,
    hidden=576,
    vocab_size=49155,
    context_length=8192,
    norm=NormRule(1e-5),
    ropes=_rope(64),
)
QWEN_30B_A3B = ModelConfig(  # a mixture of experts
    architecture="qwen3moe",
    layers=(layer(32, 4, 128, ExpertConfig(Routing(128, 8), 768)),) * 48,
    hidden=2048,
    vocab_size=151936,
    context_length=40960,
    norm=NormRule(1e-6),
    ropes=_rope(128),
    head_norm=HeadNorm.EACH,
)
TINY = replace(LLAMA_8B, layers=(layer(2, 1, 32, 64),), hidden=64, vocab_size=64)
TINY_EXPERTS = replace(
    TINY,
    architecture="qwen3moe",
    head_norm=HeadNorm.EACH,
    layers=(layer(2, 1, 32, ExpertConfig(Routing(4, 2), 32)),),
)
DELTA_27B = DeltaConfig(16, 48, 128, 128, 4, tiled=True)  # of Qwen 3.5 to 3.8
DELTA_35B_A3B = DeltaConfig(16, 32, 128, 128, 4, tiled=True)
TINY_DELTA = DeltaConfig(1, 2, 16, 16, 4, tiled=True)
WIDE_HEADS = AttentionConfig(16, CacheConfig(2, 512))  # of the layers of Gemma 4 26B-A4B without a window
SHAPES = (LLAMA_8B, QWEN_32B, GEMMA_9B, SMALL_135M)


def mixer_of(model: ModelConfig) -> AttentionConfig:
    """Return the attention of the last layer. Other layers may have another window."""
    mixer = model.layers[-1].mixer
    assert isinstance(mixer, AttentionConfig)
    return mixer


def matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of every matrix of a layer, with fused matrices as one, and of the head."""
    (mlp,), mixer = model.mlp_widths, mixer_of(model)
    return {
        "qkv": (mixer.qkv_width, model.hidden),
        "out": (model.hidden, mixer.width),
        "gate_up": (2 * mlp, model.hidden),
        "down": (model.hidden, mlp),
        "head": (model.vocab_size, model.hidden),
    }
