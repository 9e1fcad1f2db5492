"""The Llama family against transformers, with GGUF files, batches, the paged cache, and the reference kernels."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from engine import models
from engine.backends.reference import ReferenceDevice, ReferenceOperations
from engine.batch import build_batch
from engine.checkpoints.metadata import Metadata
from engine.checkpoints.weights import Weights
from engine.config import BLOCK_SIZE
from engine.errors import UnsupportedModel
from engine.kv.cache import KVCache, kv_groups
from engine.loading import open_checkpoint
from engine.model_config import Llama3Scaling, RopeConfig
from engine.models import Model
from engine.rope import inverse_frequencies
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from quant.errors import ModelFileError
from tests.engine.models.tiny_llama import LLAMA3_SCALING, TinyLlama, make
from tests.support.held_request import HeldRequest

BLOCKS = 40


def load(path: Path) -> Model:
    with open_checkpoint(path) as checkpoint:
        config = models.read_config(checkpoint.metadata)
        return models.load(
            config,
            Weights(checkpoint.path, models.stored_weights(checkpoint)),
            ReferenceOperations(keep_dequantized=True),
            512,
        )


def poisoned_cache(model: Model) -> KVCache:
    """Return a KV cache that is NaN where nothing was written."""
    device = ReferenceDevice(keep_dequantized=True, threads=1)
    kv = KVCache(kv_groups(model.config, device.layer_block), [BLOCKS])
    for pool in kv.pools:
        pool.fill_(torch.nan)
    return kv


def request(number: int, ids: Sequence[int], blocks: Sequence[int]) -> HeldRequest:
    return HeldRequest(number, tuple(ids), SamplingParams(), block_tables=(list(blocks),))


def forward(model: Model, kv: KVCache, parts: list[tuple[HeldRequest, int]]) -> Tensor:
    """Run a step. Returns the logits of requests whose prompt is complete, and advances `num_computed`."""
    plan = StepPlan(tuple(it.next_part(n) for it, n in parts))
    with torch.inference_mode():
        logits: Tensor = model.forward(build_batch(plan, vocab_size=97, num_blocks=BLOCKS), kv)
    for it, count in parts:
        it.num_computed += count
    return logits


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(tiny: TinyLlama, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = tiny.reference(torch.tensor([list(ids)])).logits[0, -1]
    return logits


PLAIN_ROPE = RopeConfig(base=10000.0, dimensions=16, interleaved=True)
ROPE_FACTORS = inverse_frequencies(PLAIN_ROPE) / inverse_frequencies(
    replace(PLAIN_ROPE, scaling=Llama3Scaling(factor=8.0, low=1.0, high=4.0, original_context=64))
)
VARIANTS = {
    "grouped-query": {},
    "tied": {"tied": True},
    "multi-head": {"kv_heads": 4},
    "multi-query, wide heads": {"kv_heads": 1, "head_dim": 32},
    "three heads a group": {"heads": 6, "kv_heads": 2},
    "llama3 rope": {"rope": LLAMA3_SCALING, "rope_factors": ROPE_FACTORS},
    "linear rope": {"rope": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, "linear_factor": 4.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [1, BLOCK_SIZE, BLOCK_SIZE + 1, 150])
def test_logits_equal_transformers(tmp_path: Path, variant: str, length: int) -> None:
    tiny = make(tmp_path, **VARIANTS[variant])  # type: ignore[arg-type]
    model = load(tiny.path)
    ids = prompt(length, seed=length)
    logits = forward(model, poisoned_cache(model), [(request(1, ids, range(5, 5 + 10)), length)])
    torch.testing.assert_close(logits[0], expected(tiny, ids), rtol=0, atol=1e-4)


def test_llama3_rope_factors_change_the_logits(tmp_path: Path) -> None:
    """The logits of the variant above depend on its factors."""
    tiny = make(tmp_path, rope=LLAMA3_SCALING)
    model = load(tiny.path)
    ids = prompt(150, seed=1)
    logits = forward(model, poisoned_cache(model), [(request(1, ids, range(1, 11)), 150)])
    assert (logits[0] - expected(tiny, ids)).abs().max() > 0.01


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("chunk", [1, 7, BLOCK_SIZE, 33, 149])
def test_chunks_give_the_same_bits_as_the_whole_prompt(tiny: TinyLlama, chunk: int) -> None:
    model = load(tiny.path)
    ids = prompt(150, seed=3)
    whole = forward(model, poisoned_cache(model), [(request(1, ids, range(1, 11)), 150)])
    kv, it = poisoned_cache(model), request(2, ids, [9, 3, 17, 1, 30, 22, 5, 8, 39, 11])
    while it.num_computed < 150:
        logits = forward(model, kv, [(it, min(chunk, 150 - it.num_computed))])
    assert torch.equal(logits, whole)


def test_batch_gives_the_same_bits_as_single_requests(tiny: TinyLlama) -> None:
    model = load(tiny.path)
    lengths = [1, 15, 16, 17, 40, 130]
    alone = []
    for number, length in enumerate(lengths):
        blocks = range(1, 2 + length // BLOCK_SIZE)
        alone.append(forward(model, poisoned_cache(model), [(request(number, prompt(length, number), blocks), length)]))
    parts, first = [], 1
    for number, length in enumerate(lengths):
        needed = length // BLOCK_SIZE + 1
        parts.append((request(number, prompt(length, number), range(first, first + needed)), length))
        first += needed
    together = forward(model, poisoned_cache(model), parts)
    assert torch.equal(together, torch.cat(alone))


def test_decode_beside_a_prefill_equals_transformers(tiny: TinyLlama) -> None:
    model = load(tiny.path)
    kv = poisoned_cache(model)
    first, second = request(1, prompt(30, 1), [4, 2, 6]), request(2, prompt(50, 2), [1, 3, 5, 7])
    forward(model, kv, [(first, 30)])
    for step in range(10):
        first.output_ids.append(step * 7 % 97)
        logits = forward(model, kv, [(first, 1), (second, 5)])
        ids = [*first.prompt_ids, *first.output_ids]
        torch.testing.assert_close(logits[0], expected(tiny, ids), rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[1], expected(tiny, second.prompt_ids), rtol=0, atol=1e-4)


def test_incomplete_prompt_has_no_logits(tiny: TinyLlama) -> None:
    model = load(tiny.path)
    assert forward(model, poisoned_cache(model), [(request(1, prompt(20, 1), [1, 2]), 5)]).shape == (0, 97)


# -- unsupported checkpoints


def edited(tiny: TinyLlama, key: str, value: int | str) -> dict[str, object]:
    with open_checkpoint(tiny.path) as checkpoint:
        return {**checkpoint.metadata.values, key: value}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", "three"),
        ("llama.embedding_length", -1),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.key_length", 15),
        ("llama.attention.value_length", 8),
        ("llama.rope.dimension_count", 8),
        ("llama.rope.scaling.type", "bent"),
        ("llama.rope.freq_base", float("nan")),
        ("llama.attention.layer_norm_rms_epsilon", 2.0),
        ("llama.context_length", True),
    ],
)
def test_unsupported_metadata_values_are_refused(tiny: TinyLlama, key: str, value: int | str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        models.read_config(Metadata(edited(tiny, key, value), "llama"))
    assert str(value) in str(caught.value)


def test_error_names_the_missing_metadata_key(tiny: TinyLlama) -> None:
    with open_checkpoint(tiny.path) as checkpoint:
        metadata = {key: value for key, value in checkpoint.metadata.values.items() if key != "llama.block_count"}
    with pytest.raises(UnsupportedModel, match=r"llama\.block_count"):
        models.read_config(Metadata(metadata, "llama"))


def test_error_names_the_unknown_architecture() -> None:
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        models.read_config(Metadata({}, "mamba"))


def test_missing_extra_and_misshapen_tensors_are_refused(tiny: TinyLlama, tmp_path: Path) -> None:
    for change, error, names in (
        ("drop", ModelFileError, "blk.1.ffn_up.weight"),
        ("extra", UnsupportedModel, "blk.0.ffn_up.bias"),
        ("shape", ModelFileError, "output_norm.weight"),
    ):
        path = tmp_path / f"{change}.gguf"
        rewrite(tiny.path, path, change)
        with pytest.raises(error, match=names):
            load(path)


def rewrite(source: Path, target: Path, change: str) -> None:
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for key, value in reader.fields.items():
        if key.startswith("llama."):
            writer.add_key_value(key, value.contents(), value.types[0])
    for tensor in reader.tensors:
        if change == "drop" and tensor.name == "blk.1.ffn_up.weight":
            continue
        cut = change == "shape" and tensor.name == "output_norm.weight"
        writer.add_tensor(tensor.name, tensor.data[:32] if cut else tensor.data)
    if change == "extra":
        writer.add_tensor("blk.0.ffn_up.bias", torch.zeros(96).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
