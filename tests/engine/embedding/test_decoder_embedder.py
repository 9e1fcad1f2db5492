"""Decoders as embedding models against transformers."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.embedding.decoder_embedder import DecoderEmbedder, load_decoder_embedder
from engine.errors import EngineError, PromptTooLong
from engine.load_options import LoadOptions
from engine.loading import open_checkpoint
from tests.engine.models.tiny_llama import TinyLlama, make

LENGTHS = (1, 2, 15, 16, 17, 40, 90)
CONTEXT = 128


@contextmanager
def loaded(path: Path, backend: str, code_cache: Path | None = None) -> Iterator[DecoderEmbedder]:
    options = LoadOptions(backend=backend, context_length=CONTEXT, threads=2, code_cache=code_cache)
    with open_checkpoint(path) as checkpoint:
        embedder = load_decoder_embedder(checkpoint, options)
    with closing(embedder):
        yield embedder


def texts(seed: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (length,), generator=random).tolist() for length in LENGTHS]


def expected(tiny: TinyLlama, sequences: list[list[int]]) -> Tensor:
    with torch.inference_mode():
        states = [tiny.reference.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in sequences]
    return F.normalize(torch.stack(states), dim=1)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("tied", [False, True])
def test_vectors_are_the_states_of_the_last_token(tmp_path: Path, cpu_kernels: Path, backend: str, tied: bool) -> None:
    tiny = make(tmp_path, tied=tied, head_dim=32, hidden=64)
    with loaded(tiny.path, backend, cpu_kernels) as embedder:
        vectors = embedder.encode(texts(1))
        assert (embedder.hidden, embedder.vocab_size, embedder.context_length) == (64, 97, CONTEXT - 1)
    assert F.cosine_similarity(vectors, expected(tiny, texts(1))).min() > 0.99999
    assert torch.allclose(vectors.norm(dim=1), torch.ones(len(LENGTHS)), atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bits_of_a_vector_depend_only_on_its_text(tmp_path: Path, cpu_kernels: Path, backend: str) -> None:
    """Neither other texts in the batch nor cached prefixes change the bits."""
    tiny, sequences = make(tmp_path, head_dim=32, hidden=64), texts(2)
    longer = [[*ids, 5, 6] for ids in sequences]
    with loaded(tiny.path, backend, cpu_kernels) as embedder:
        together, cached = embedder.encode(sequences), embedder.encode(longer)
        again = embedder.encode(sequences)
    with loaded(tiny.path, backend, cpu_kernels) as embedder:
        alone = torch.stack([embedder.encode([ids])[0] for ids in [*longer, *sequences]])
    assert torch.equal(torch.cat([cached, together]).view(torch.int32), alone.view(torch.int32))
    assert torch.equal(again.view(torch.int32), together.view(torch.int32))


def test_common_prefix_is_computed_once(tmp_path: Path) -> None:
    tiny, prompt = make(tmp_path), list(range(90))
    with loaded(tiny.path, "reference") as embedder:
        embedder.encode([prompt])
        embedder.encode([[*prompt, 1]])
        counters = embedder.state().counters
    assert counters.prompts.cached == 80


def test_too_long_text_and_unknown_ids_are_rejected(tmp_path: Path) -> None:
    with loaded(make(tmp_path).path, "reference") as embedder:
        embedder.encode([[1] * embedder.context_length])
        with pytest.raises(PromptTooLong):
            embedder.encode([[1] * (embedder.context_length + 1)])
        with pytest.raises(IndexError):
            embedder.encode([[97]])


def test_futures_of_cancelled_and_abandoned_texts_end(tmp_path: Path) -> None:
    with loaded(make(tmp_path).path, "reference") as embedder:
        futures = [embedder.submit([number % 97] * 100) for number in range(60)]
        assert futures[-1].cancel()
        assert torch.isfinite(futures[-2].result()).all()
        last = [embedder.submit([number % 97] * 101) for number in range(60)]
    errors = [future.exception() for future in last]
    assert any(isinstance(error, EngineError) and "being stopped" in error.message for error in errors)
    with pytest.raises(EngineError):
        embedder.submit([1])
