"""Loading embedding models from a folder and from a GGUF file."""

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

from app.errors import UnsupportedTokenizer
from app.generation.embedding_service import EmbeddingService
from app.models.load.loaded_encoder import LoadedEncoder, is_embedding_model, load_encoder_model
from app.models.load.loaded_model import load_model
from app.models.quantized_copy import save_quantized
from app.models.store import ModelStore
from app.progress import SilentProgress
from app.settings.settings import Settings
from engine.embedding.encoder import Pooling, pool_states
from engine.errors import UnsupportedModel
from quant.quantized_storage import Method
from quant.safetensors_shards import SafetensorsShards
from tests.app.models.tiny_chat import save
from tests.app.models.tiny_model import settings_in
from tests.app.text.small_wordpiece import TOKENS, document, ids, metadata
from tests.app.text.tiny_tokenizer import EOS, VOCABULARY, byte_level
from tests.engine.models.tiny_bert import TinyBert, make, make_ranking, write_modules


def embedding_model(folder: Path, vocab: int = len(TOKENS)) -> TinyBert:
    """A tiny BERT with a small vocabulary, stored both as a folder and as a GGUF file."""
    tiny = make(folder, vocab=vocab, pooling="pooling_mode_cls_token", metadata=metadata())
    (folder / "tokenizer.json").write_bytes(document())
    return tiny


def load(path: Path, settings: Settings) -> LoadedEncoder:
    stored = ModelStore(settings).resolve(str(path))
    assert is_embedding_model(stored)
    return load_encoder_model(stored, settings, SilentProgress())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path / "home", kernels="reference")


def test_folder_and_file_give_the_same_vectors(tmp_path: Path, settings: Settings) -> None:
    tiny = embedding_model(tmp_path / "model")
    expected = pool_states(tiny.states(ids("hello", "wor", "##ld")), Pooling.CLS)
    for path in (tiny.folder, tiny.path):
        model = load(path, settings)
        with closing(model.encoder) as encoder:
            vector = encoder.encode([model.tokenizer.encode("Hello world")])[0]
        assert torch.allclose(vector, expected, atol=1e-5)
        assert encoder.context_length == 48


def test_cross_encoder_scores_a_pair_of_texts(tmp_path: Path, settings: Settings) -> None:
    reference, file = make_ranking(tmp_path / "model", vocab=len(TOKENS), metadata=metadata())
    (tmp_path / "model" / "tokenizer.json").write_bytes(document())
    first, second = ids("hello", "wor"), ids("a")[1:]
    types = torch.tensor([[0] * len(first) + [1] * len(second)])
    with torch.inference_mode():
        expected = reference(torch.tensor([[*first, *second]]), token_type_ids=types).logits.sigmoid()
    for path in (file.parent, file):
        model = load(path, settings)
        service = EmbeddingService("ranking", model.tokenizer, model.encoder)
        with closing(model.encoder):
            [pair] = asyncio.run(service.encode_pairs("hello wor", ["a"]))
            assert pair == ((*first, *second), len(first))
            assert asyncio.run(service.scores([pair])) == pytest.approx([float(expected)], abs=1e-5)


def test_quantized_copy_gives_similar_vectors(tmp_path: Path, settings: Settings) -> None:
    tiny = embedding_model(tmp_path / "model")
    save_quantized(tiny.folder, tmp_path / "copy", Method("fp8"), SilentProgress())
    with SafetensorsShards(tmp_path / "copy") as checkpoint:
        kept = [name for name, tensor in checkpoint.tensors.items() if "_embeddings" in name]
        assert {checkpoint.tensors[name].type.name for name in kept} == {"F32"}
    model = load(tmp_path / "copy", settings)
    with closing(model.encoder) as encoder:
        vector = encoder.encode([model.tokenizer.encode("Hello world")])[0]
    expected = pool_states(tiny.states(ids("hello", "wor", "##ld")), Pooling.CLS)
    assert 0.98 < vector @ expected < 0.99999


@pytest.mark.parametrize("family", [(LlamaConfig, LlamaModel), (Qwen3Config, Qwen3Model)])
def test_decoder_returns_the_state_of_its_last_token(tmp_path: Path, settings: Settings, family: Any) -> None:
    """The checkpoint is like Qwen3-Embedding: it has no output head, and each text ends with an end token."""
    torch.manual_seed(5)
    make_config, make_model = family
    config = make_config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    reference = make_model(config).train(mode=False)
    reference.save_pretrained(tmp_path)
    tokenizer = byte_level()
    end = tokenizer.token_to_id(EOS)
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {EOS}", special_tokens=[(EOS, end)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_modules(tmp_path, {"pooling_mode_lasttoken": True})
    model = load(tmp_path, settings)
    ids = model.tokenizer.encode("Hello world")
    assert ids == (*tokenizer.encode("Hello world", add_special_tokens=False).ids, end)
    with closing(model.encoder) as encoder:
        vector = encoder.encode([ids])[0]
    with torch.inference_mode():
        expected = pool_states(reference(torch.tensor([ids])).last_hidden_state[0], Pooling.LAST)
    assert torch.allclose(vector, expected, atol=1e-4)


def test_unsupported_pooling_of_a_decoder_is_refused(tmp_path: Path, settings: Settings) -> None:
    save(tmp_path)
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True})
    with pytest.raises(UnsupportedModel, match="asks for the pooling mode mean, which decoders"):
        load(tmp_path, settings)


def test_context_setting_shortens_the_context(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "home", kernels="reference", context=16)
    with closing(load(embedding_model(tmp_path / "model").folder, settings).encoder) as encoder:
        assert encoder.context_length == 16


def test_vocabulary_larger_than_the_models_is_refused(tmp_path: Path, settings: Settings) -> None:
    tiny = embedding_model(tmp_path / "model", vocab=len(TOKENS) - 1)
    with pytest.raises(
        UnsupportedModel, match=f"a vocabulary of {len(TOKENS)} tokens, but its model has {len(TOKENS) - 1}"
    ):
        load(tiny.folder, settings)


def test_refused_decoder_leaves_no_thread(tmp_path: Path, settings: Settings) -> None:
    save(tmp_path)
    write_modules(tmp_path, {"pooling_mode_lasttoken": True})
    tokenizer = byte_level()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    threads = threading.active_count()
    with pytest.raises(UnsupportedModel, match=f"a vocabulary of {VOCABULARY + 1} tokens"):
        load(tmp_path, settings)
    assert threading.active_count() == threads


def test_folder_without_a_vocabulary_is_refused(tmp_path: Path, settings: Settings) -> None:
    tiny = embedding_model(tmp_path / "model")
    (tiny.folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedTokenizer, match=r"has no tokenizer\.json"):
        load(tiny.folder, settings)


def test_embedding_model_cannot_chat(tmp_path: Path, settings: Settings) -> None:
    tiny = embedding_model(tmp_path / "model")
    for path in (tiny.folder, tiny.path):
        with pytest.raises(UnsupportedModel, match="return embeddings and cannot generate text") as refusal:
            load_model(ModelStore(settings).resolve(str(path)), settings, SilentProgress())
        assert "POST /v1/embeddings" in refusal.value.remedy


def test_chat_model_is_rejected_as_an_embedding_model(smollm2: Path, settings: Settings) -> None:
    assert not is_embedding_model(ModelStore(settings).resolve(str(smollm2)))
