"""Checkpoints with random weights load like files and are as large as real ones."""

from dataclasses import replace

from engine import models
from engine.models.llama import NAMES
from quant.tensor import CodedTensor
from tests.gpu.random_checkpoint import META, RandomCheckpoint
from tests.kernels.shapes import LLAMA_8B, QWEN_30B_A3B
from tests.support.weight_mixes import Q4_K_M


def test_metadata_describes_the_model() -> None:
    checkpoint = RandomCheckpoint(LLAMA_8B, "BF16", META)
    read = models.read_config(checkpoint.metadata)
    for name in ("layers", "hidden", "vocab_size", "context_length"):
        assert getattr(read, name) == getattr(LLAMA_8B, name)


def test_weights_are_as_large_as_in_a_real_file() -> None:
    """Llama 3.1 8B has 8.03e9 weights; as Q4_K_M it takes 4.92 GB, including its embedding."""
    plain, mixed = (RandomCheckpoint(LLAMA_8B, mix, META) for mix in ("BF16", Q4_K_M))
    assert sum(it.nbytes for it in plain.weights(NAMES).values()) // 10**7 == 1606
    assert 4.8e9 < sum(it.nbytes for it in mixed.weights(NAMES).values()) < 5.1e9
    embedding = mixed.weights(NAMES)["token_embd.weight"].nbytes
    assert mixed.bytes_per_step() + embedding == sum(it.nbytes for it in mixed.weights(NAMES).values())


def test_checkpoint_with_experts_reads_those_in_use() -> None:
    checkpoint = RandomCheckpoint(replace(QWEN_30B_A3B, layers=QWEN_30B_A3B.layers[:1]), Q4_K_M, META)
    read = models.read_config(checkpoint.metadata)
    assert (read.layers, read.head_norm) == (QWEN_30B_A3B.layers[:1], QWEN_30B_A3B.head_norm)
    stored = checkpoint.weights(NAMES)
    experts = sum(it.nbytes for name, it in stored.items() if "ffn_" in name and name.split(".")[3].isdigit())
    others = sum(it.nbytes for it in stored.values()) - experts - stored["token_embd.weight"].nbytes
    assert checkpoint.bytes_per_step() == others + experts // 16
    assert checkpoint.bytes_per_step(1000) == others + experts


def test_weights_are_made_on_the_given_device() -> None:
    stored = RandomCheckpoint(LLAMA_8B, Q4_K_M, META).weights(NAMES)["blk.0.ffn_down.weight"]
    made = stored.decode()
    assert (made.shape, made.type_name) == ((4096, 14336), "Q6_K")
    assert isinstance(made, CodedTensor)
    assert made.scale.block_scales.device == META
