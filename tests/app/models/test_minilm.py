"""The vectors of a real embedding model equal those of transformers with the pooling of sentence-transformers."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from app.models.load.loaded_encoder import load_encoder_model
from app.models.store import ModelStore
from app.progress import SilentProgress
from tests.app.models.tiny_model import settings_in

TEXTS = [
    "A man is eating food.",
    "Somebody has a meal.",
    "The stock market fell by three percent on Monday.",
    "def add(a, b):\n    return a + b",
    "Überraschung! Çà et là, naïve façade.",
    "你好，世界。我在用电脑。",
    "こんにちは世界",
    "Привет, мир!",
    "🙂🚀 emoji 👩‍👩‍👧",
    "a",
    "!!!",
    "3.14159 and 2,718.28",
    "UPPER lower MiXeD",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "tabs\tand\nlines\r\nand\u00a0spaces",
    "https://example.org/path?query=1#part",
    "What is the capital of France?",
    "Paris is the capital of France.",
    "one two three " * 20,
    "The quick brown fox jumps over the lazy dog. " * 12,
]


@pytest.fixture(scope="module")
def expected(minilm: Path) -> Tensor:
    tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm).train(mode=False)
    vectors = []
    for text in TEXTS:
        with torch.inference_mode():
            vectors.append(model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0))
    return F.normalize(torch.stack(vectors), dim=1)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_vectors_equal_those_of_sentence_transformers(
    tmp_path: Path, minilm: Path, cpu_kernels: Path, expected: Tensor, kernels: str
) -> None:
    settings = settings_in(tmp_path, kernels=kernels, cache_dir=cpu_kernels)
    model = load_encoder_model(ModelStore(settings).resolve(str(minilm)), settings, SilentProgress())
    with closing(model.encoder) as encoder:
        vectors = encoder.encode([model.tokenizer.encode(text) for text in TEXTS])
    assert encoder.context_length == 256
    assert F.cosine_similarity(vectors, expected).min() > 0.9999
    assert (vectors - expected).abs().max() < 1e-4
