"""A stored embedding model becomes an encoder and a vocabulary, out of a folder and out of a GGUF file."""

from pathlib import Path

import pytest
import torch

from app.config import Settings
from app.errors import UnsupportedTokenizer
from app.models.loaded_encoder import LoadedEncoder, gives_embeddings, load_encoder_model
from app.models.loaded_model import load_model
from app.models.store import ModelStore
from app.progress import SilentProgress
from engine.encoder import Pooling, pooled
from engine.errors import UnsupportedModel
from tests.app.models.tiny_model import settings_in
from tests.app.text.small_wordpiece import TOKENS, document, ids, metadata
from tests.engine.tiny_bert import TinyBert, make


def embedding_model(folder: Path, vocab: int = len(TOKENS)) -> TinyBert:
    """A tiny BERT with a small vocabulary, in both forms."""
    tiny = make(folder, vocab=vocab, pooling="pooling_mode_cls_token", metadata=metadata())
    (folder / "tokenizer.json").write_bytes(document())
    return tiny


def load(path: Path, settings: Settings) -> LoadedEncoder:
    stored = ModelStore(settings).resolve(str(path))
    assert gives_embeddings(stored)
    return load_encoder_model(stored, settings, SilentProgress())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path / "home", kernels="reference")


def test_folders_and_files_are_the_same_model(tmp_path: Path, settings: Settings) -> None:
    tiny = embedding_model(tmp_path / "model")
    expected = pooled(tiny.states(ids("hello", "wor", "##ld")), Pooling.CLS)
    for path in (tiny.folder, tiny.path):
        model = load(path, settings)
        with model.encoder as encoder:
            vector = encoder.encode([model.tokenizer.encode("Hello world")])[0]
        assert torch.allclose(vector, expected, atol=1e-5)
        assert encoder.context_length == 48


def test_the_context_can_be_shorter(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "home", kernels="reference", context=16)
    with load(embedding_model(tmp_path / "model").folder, settings).encoder as encoder:
        assert encoder.context_length == 16


def test_a_vocabulary_that_is_larger_than_the_models_is_refused(tmp_path: Path, settings: Settings) -> None:
    tiny = embedding_model(tmp_path / "model", vocab=len(TOKENS) - 1)
    with pytest.raises(UnsupportedModel, match=f"names {len(TOKENS)} tokens, and its model knows {len(TOKENS) - 1}"):
        load(tiny.folder, settings)


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path, settings: Settings) -> None:
    tiny = embedding_model(tmp_path / "model")
    (tiny.folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedTokenizer, match=r"has no tokenizer\.json"):
        load(tiny.folder, settings)


def test_it_is_no_model_to_chat_with(tmp_path: Path, settings: Settings) -> None:
    tiny = embedding_model(tmp_path / "model")
    for path in (tiny.folder, tiny.path):
        with pytest.raises(UnsupportedModel, match="give embeddings, and cannot chat") as refusal:
            load_model(ModelStore(settings).resolve(str(path)), settings, SilentProgress())
        assert "POST /v1/embeddings" in refusal.value.remedy


def test_a_model_that_writes_text_is_none(smollm2: Path, settings: Settings) -> None:
    assert not gives_embeddings(ModelStore(settings).resolve(str(smollm2)))
