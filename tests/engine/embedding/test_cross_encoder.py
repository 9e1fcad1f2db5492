"""Cross-encoders against transformers, from folders and GGUF files."""

from pathlib import Path

import pytest
import torch

from engine.embedding.encoder import Encoder
from engine.embedding.loading import is_embedding_model, load_encoder
from engine.load_options import LoadOptions
from engine.loading import open_checkpoint
from quant.errors import ModelFileError
from tests.engine.models.tiny_bert import make_ranking

PAIRS = [([1, 5, 9, 2], [7, 7, 2]), ([1, 2], [3]), ([1, *range(10, 30), 2], [*range(40, 60), 2])]


def load(path: Path, backend: str, code_cache: Path) -> Encoder:
    with open_checkpoint(path) as checkpoint:
        assert is_embedding_model(checkpoint)
        return load_encoder(checkpoint, LoadOptions(backend=backend, code_cache=code_cache, threads=2))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_scores_equal_transformers(tmp_path: Path, cpu_kernels: Path, backend: str) -> None:
    model, file = make_ranking(tmp_path)
    expected = []
    for first, second in PAIRS:
        types = torch.tensor([[0] * len(first) + [1] * len(second)])
        with torch.inference_mode():
            expected.append(float(model(torch.tensor([[*first, *second]]), token_type_ids=types).logits))
    for path in (tmp_path, file):
        with load(path, backend, cpu_kernels) as encoder:
            assert (encoder.ranks, encoder.hidden) == (True, 1)
            scores = [encoder.submit([*first, *second], len(first)).result() for first, second in PAIRS]
        assert [float(score) for score in scores] == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.01


def test_head_with_several_labels_is_refused(tmp_path: Path, cpu_kernels: Path) -> None:
    make_ranking(tmp_path, labels=3)
    with pytest.raises(ModelFileError, match=r"classifier\.\w+ has shape"):
        load(tmp_path, "reference", cpu_kernels)
