"""Distance of the CPU kernels' log-probabilities from float32, with the same weights."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.text.gguf_tokenizer import from_gguf
from engine import models
from engine.backends.cpu.device import CpuStep
from engine.backends.reference import ReferenceDevice
from engine.backends.runner import ModelRunner
from engine.checkpoints.weights import Weights
from engine.config import BLOCK_SIZE, EngineConfig
from engine.core import Engine
from engine.device import Compute, LoadedModel
from engine.loading import open_checkpoint
from engine.sampling_params import SamplingParams
from quant.kernels import reference as kernels
from tests.engine.backends.cpu.recorded import advance, load_step, sequence
from tests.engine.models.test_smollm2 import QUESTIONS
from tests.engine.models.tiny_llama import MIXES, make

CONFIG = EngineConfig("cpu", context_length=256, num_blocks=150, max_step_tokens=256, threads=1)
NEW_TOKENS = 32

# If the gap between the two most likely tokens is larger than this, both must choose the same token.
TIE = 0.05


@dataclass(frozen=True)
class Distance:
    """Root mean square differences of log-probabilities over all positions of some texts."""

    vocabulary: float  # differences for all tokens of the vocabulary
    text: float  # differences for the texts' own tokens

    def __lt__(self, other: "Distance") -> bool:
        return self.vocabulary < other.vocabulary and self.text < other.text

    def __str__(self) -> str:
        return f"{self.vocabulary:.4f} over the vocabulary, {self.text:.4f} of the text's own tokens"


DEFAULT, EIGHT_BITS, INT8_CACHE = Distance(0.01, 0.01), Distance(0.25, 0.2), Distance(0.2, 0.15)


@dataclass(frozen=True)
class Texts:
    """Prompts with the model's greedy replies, and the float32 distributions at each token."""

    ids: list[list[int]]
    prompt_lengths: list[int]
    logprobs: list[Tensor]


def logprobs(compute: Compute, ids: Sequence[int], vocab_size: int) -> Tensor:
    """Return float32 [len(ids), vocabulary]: row i is the distribution of the token after ids[i]."""
    request = sequence(1, ids, range(1, 2 + len(ids) // BLOCK_SIZE))
    batch = advance([(request, len(ids))], vocab_size=vocab_size, num_blocks=CONFIG.num_blocks)
    return torch.log_softmax(compute(batch).values.double(), -1).float()


@pytest.fixture(scope="module", autouse=True)
def _long_tiles() -> Iterator[None]:
    """Let the reference kernels multiply whole texts at once, which is much faster.

    Results with equal bits in every batch are not needed here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ROW_TILE", 64)
        yield


def reference(path: Path, kv_type: torch.dtype = torch.float32) -> Compute:
    plain = ReferenceDevice(keep_dequantized=True, threads=1)
    plain.kv_type = kv_type
    with open_checkpoint(path) as checkpoint:
        model = models.read_config(checkpoint.metadata)
        return plain.load(model, Weights(checkpoint.path, models.stored_weights(checkpoint)), CONFIG).compute


def greedy(step: CpuStep, prompts: list[list[int]], vocab_size: int) -> list[list[int]]:
    """Return prompts with their greedy replies, computed in one batch."""
    runner = ModelRunner(LoadedModel(step, step._kv), vocab_size)
    engine = Engine(CONFIG, vocab_size, runner)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    requests = [engine.request(tuple(prompt), params, frozenset({2})) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [[*request.prompt_ids, *request.output_ids] for request in requests]


def distance(compute: Compute, texts: Texts, vocab_size: int) -> Distance:
    over_vocabulary, of_text = [], []
    for ids, theirs in zip(texts.ids, texts.logprobs, strict=True):
        squares = (logprobs(compute, ids, vocab_size) - theirs).square()
        over_vocabulary.append(squares.mean(-1))
        of_text.append(squares[torch.arange(len(ids) - 1), ids[1:]])
    return Distance(*(float(torch.cat(squares).mean().sqrt()) for squares in (over_vocabulary, of_text)))


@pytest.fixture(scope="module")
def step(smollm2: Path, cpu_kernels: Path) -> CpuStep:
    """SmolLM2 with the default settings."""
    return load_step(smollm2, cpu_kernels, CONFIG)


@pytest.fixture(scope="module")
def texts(smollm2: Path, step: CpuStep, seed: int) -> Texts:
    """A random half of the questions."""
    with open_checkpoint(smollm2) as checkpoint:
        tokenizer = from_gguf(checkpoint.metadata.values)
    questions = random.Random(seed).sample(QUESTIONS, 4)
    turns = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions]
    prompts = [list(tokenizer.encode(turn, parse_special=True)) for turn in turns]
    ids, plain = greedy(step, prompts, 49152), reference(smollm2)
    return Texts(ids, [len(prompt) for prompt in prompts], [logprobs(plain, text, 49152) for text in ids])


@pytest.fixture(scope="module")
def default(step: CpuStep, texts: Texts) -> Distance:
    return distance(step, texts, 49152)


def test_smollm2_log_probabilities_are_close_to_float32(default: Distance) -> None:
    print(f"default: {default}")
    assert default < DEFAULT


def test_8_bit_activations_are_less_accurate(smollm2: Path, cpu_kernels: Path, texts: Texts, default: Distance) -> None:
    one = distance(load_step(smollm2, cpu_kernels, CONFIG, activation_bits=8), texts, 49152)
    print(f"one plane: {one}")
    assert default < one < EIGHT_BITS


def test_int8_cache_is_less_accurate(smollm2: Path, cpu_kernels: Path, texts: Texts, default: Distance) -> None:
    integers = distance(load_step(smollm2, cpu_kernels, CONFIG, kv_type=torch.int8), texts, 49152)
    print(f"int8 cache: {integers}")
    assert default < integers < INT8_CACHE


def test_smollm2_greedy_tokens_equal_float32(texts: Texts) -> None:
    """Every token of every reply is the most likely one in float32, unless two tokens are nearly tied."""
    compared, largest_tie = 0, 0.0
    for ids, prompt, rows in zip(texts.ids, texts.prompt_lengths, texts.logprobs, strict=True):
        for index in range(prompt, len(ids)):
            best = rows[index - 1].topk(2)
            gap = float(best.values[0] - best.values[1])
            if ids[index] != int(best.indices[0]):
                largest_tie = max(largest_tie, gap)
                assert gap < TIE
            compared += 1
    print(f"{compared} tokens, other choices at gaps up to {largest_tie:.4f}")
    assert compared > 100


@pytest.mark.parametrize("mix", MIXES)
def test_tiny_models_are_close_to_float32(tmp_path: Path, cpu_kernels: Path, mix: str) -> None:
    tiny = make(tmp_path, heads=4, kv_heads=2, head_dim=32, hidden=96, vocab=300, types=MIXES[mix], seed=1)
    plain, generator = reference(tiny.path), torch.Generator().manual_seed(16)
    ids = [torch.randint(0, 300, (length,), generator=generator).tolist() for length in (2, 17, 150)]
    texts = Texts(ids, [], [logprobs(plain, text, 300) for text in ids])
    one, two = (
        distance(load_step(tiny.path, cpu_kernels, CONFIG, activation_bits=bits), texts, 300) for bits in (8, 14)
    )
    print(f"{mix}: one plane {one}; default {two}")
    assert two < DEFAULT
    assert two < one < EIGHT_BITS


def test_float_weights_are_limited_by_cache_precision_only(tmp_path: Path, cpu_kernels: Path) -> None:
    """The only rounding is that of keys and values to float16, as in a reference cache of that type."""
    tiny = make(tmp_path, heads=4, kv_heads=4, head_dim=64, hidden=96, vocab=300, seed=2)
    step, ids = load_step(tiny.path, cpu_kernels, CONFIG), list(range(0, 300, 2))
    found = [
        distance(step, Texts([ids], [], [logprobs(reference(tiny.path, kv_type), ids, 300)]), 300)
        for kv_type in (torch.float16, torch.float32)
    ]
    print(f"float16 cache: {found[0]}; float32 cache: {found[1]}")
    assert found[0] < Distance(1e-3, 1e-3)
    assert found[1] < Distance(0.01, 0.01)
