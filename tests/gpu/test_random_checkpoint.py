"""A checkpoint of random weights is loaded as one of files is, and as large."""

from engine import models
from engine.models.llama import NAMES
from quant.tensor import CodedTensor
from tests.gpu.random_checkpoint import META, RandomCheckpoint
from tests.kernels.shapes import LLAMA_8B
from tests.support.weight_mixes import Q4_K_M


def test_it_is_the_model_that_was_asked_for() -> None:
    checkpoint = RandomCheckpoint(LLAMA_8B, "BF16", META)
    read = models.read_config(checkpoint.metadata)
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp_hidden", "vocab_size", "context_length"):
        assert getattr(read, name) == getattr(LLAMA_8B, name)


def test_it_is_as_large_as_a_real_file() -> None:
    """Llama 3.1 8B has 8.03e9 weights, and as Q4_K_M 4.92 GB, its embedding included."""
    plain, mixed = (RandomCheckpoint(LLAMA_8B, mix, META) for mix in ("BF16", Q4_K_M))
    assert sum(it.nbytes for it in plain.weights(NAMES).values()) // 10**7 == 1606
    assert 4.8e9 < sum(it.nbytes for it in mixed.weights(NAMES).values()) < 5.1e9
    embedding = mixed.weights(NAMES)["token_embd.weight"].nbytes
    assert mixed.read_in_a_step + embedding == sum(it.nbytes for it in mixed.weights(NAMES).values())


def test_weights_are_made_where_they_are_used() -> None:
    stored = RandomCheckpoint(LLAMA_8B, Q4_K_M, META).weights(NAMES)["blk.0.ffn_down.weight"]
    made = stored.decode()
    assert (made.shape, made.type_name) == ((4096, 14336), "Q6_K")
    assert isinstance(made, CodedTensor)
    assert made.scale.block_scales.device == META
