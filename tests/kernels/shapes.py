"""Shapes of real models. Kernels are compiled and measured for them."""

from dataclasses import replace

from engine.model_config import ExpertConfig, Gate, HeadNorm, LayerConfig, ModelConfig, NormRule, RopeConfig, Routing


def _rope(dimensions: int) -> tuple[RopeConfig, ...]:
    return (RopeConfig(base=500000.0, dimensions=dimensions, interleaved=False),)


LLAMA_8B = ModelConfig(
    architecture="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_hidden=14336,
    vocab_size=128256,
    context_length=131072,
    norm=NormRule(1e-5),
    ropes=_rope(128),
)
QWEN_32B = ModelConfig(
    architecture="qwen3",
    layers=64,
    hidden=5120,
    heads=64,
    kv_heads=8,
    head_dim=128,
    mlp_hidden=25600,
    vocab_size=151936,
    context_length=40960,
    norm=NormRule(1e-6),
    ropes=_rope(128),
    head_norm=HeadNorm.EACH,
)
GEMMA_9B = ModelConfig(
    architecture="gemma2",
    layers=42,
    hidden=3584,
    heads=16,
    kv_heads=8,
    head_dim=256,
    mlp_hidden=14336,
    vocab_size=256000,
    context_length=8192,
    norm=NormRule(1e-6),
    ropes=_rope(256),
    layout=tuple(LayerConfig(window=None if layer % 2 else 4096) for layer in range(42)),
    attention_softcap=50.0,
    logit_softcap=30.0,
    gate=Gate.GELU,
)
SMALL_135M = ModelConfig(  # SmolLM2 with an odd vocabulary size, as some models have
    architecture="llama",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    mlp_hidden=1536,
    vocab_size=49155,
    context_length=8192,
    norm=NormRule(1e-5),
    ropes=_rope(64),
)
QWEN_30B_A3B = ModelConfig(  # a mixture of experts
    architecture="qwen3moe",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    mlp_hidden=6144,
    vocab_size=151936,
    context_length=40960,
    norm=NormRule(1e-6),
    ropes=_rope(128),
    layout=(LayerConfig(experts=ExpertConfig(Routing(128, 8), 768)),) * 48,
    head_norm=HeadNorm.EACH,
)
TINY = replace(LLAMA_8B, layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, mlp_hidden=64, vocab_size=64)
TINY_EXPERTS = replace(
    TINY,
    architecture="qwen3moe",
    head_norm=HeadNorm.EACH,
    layout=(LayerConfig(experts=ExpertConfig(Routing(4, 2), 32)),),
)
SHAPES = (LLAMA_8B, QWEN_32B, GEMMA_9B, SMALL_135M)


def matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of every matrix of a layer, with fused matrices as one, and of the head."""
    width = model.heads * model.head_dim
    return {
        "qkv": (width + 2 * model.kv_heads * model.head_dim, model.hidden),
        "out": (model.hidden, width),
        "gate_up": (2 * model.mlp_hidden, model.hidden),
        "down": (model.hidden, model.mlp_hidden),
        "head": (model.vocab_size, model.hidden),
    }
