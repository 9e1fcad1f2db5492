"""BERT encoders against transformers, on both backends, from folders and GGUF files."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.embedding.encoder import Encoder, Pooling, pool_states
from engine.embedding.loading import is_embedding_model, load_encoder
from engine.errors import PromptTooLong, UnsupportedModel
from engine.load_options import LoadOptions
from engine.loading import open_checkpoint
from quant.errors import ModelFileError
from tests.engine.backends.cuda.two_devices import INTERPRETED
from tests.engine.models.tiny_bert import MIXES, TinyBert, make, write_modules

POOLING = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
}
LENGTHS = (1, 2, 3, 7, 8, 9, 17, 31, 48)


def load(path: Path, backend: str, code_cache: Path | None = None, threads: int = 2) -> Encoder:
    with open_checkpoint(path) as checkpoint:
        assert is_embedding_model(checkpoint)
        return load_encoder(checkpoint, LoadOptions(backend=backend, code_cache=code_cache, threads=threads))


def texts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (length,), generator=random).tolist() for length in lengths]


def expected(tiny: TinyBert, sequences: list[list[int]], pooling: Pooling) -> Tensor:
    return torch.stack([pool_states(tiny.states(ids), pooling) for ids in sequences])


@pytest.mark.parametrize("pooling", POOLING)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_vectors_equal_transformers(tmp_path: Path, cpu_kernels: Path, backend: str, pooling: str) -> None:
    tiny = make(tmp_path, pooling=pooling)
    sequences = texts(1)
    for path in (tiny.folder, tiny.path):
        with load(path, backend, cpu_kernels) as encoder:
            vectors = encoder.encode(sequences)
        assert vectors.shape == (len(sequences), 64)
        assert (vectors - expected(tiny, sequences, POOLING[pooling])).abs().max() < 1e-4


@pytest.mark.parametrize("shape", [{"heads": 1}, {"hidden": 60, "heads": 5, "mlp": 33}, {"mlp": 200, "positions": 50}])
def test_unusual_shapes_equal_transformers(tmp_path: Path, shape: dict[str, int]) -> None:
    tiny = make(tmp_path, **shape)  # type: ignore[arg-type]
    with load(tiny.folder, "reference") as encoder:
        assert (encoder.encode(texts(2)) - expected(tiny, texts(2), Pooling.MEAN)).abs().max() < 1e-4


@pytest.mark.parametrize("mix", MIXES)
def test_quantized_weights_give_equal_vectors_on_both_backends(tmp_path: Path, cpu_kernels: Path, mix: str) -> None:
    tiny = make(tmp_path, types=MIXES[mix])
    with load(tiny.path, "reference") as plain, load(tiny.path, "cpu", cpu_kernels) as fast:
        vectors = plain.encode(texts(3))
        assert (fast.encode(texts(3)) - vectors).abs().max() < 1e-3
    assert F.cosine_similarity(vectors, expected(tiny, texts(3), Pooling.MEAN)).min() > 0.99


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bits_of_a_vector_depend_only_on_its_text(tmp_path: Path, cpu_kernels: Path, backend: str) -> None:
    tiny = make(tmp_path, mlp=160)
    sequences = texts(4) * 3
    with load(tiny.folder, backend, cpu_kernels, threads=3) as encoder:
        together = encoder.encode(sequences)
        backwards = encoder.encode(sequences[::-1]).flip(0)
    with load(tiny.folder, backend, cpu_kernels, threads=1) as single:
        alone = torch.stack([single.encode([ids])[0] for ids in sequences])
    assert torch.equal(together.view(torch.int32), alone.view(torch.int32))
    assert torch.equal(backwards.view(torch.int32), alone.view(torch.int32))


def test_vectors_are_normalized(tmp_path: Path) -> None:
    with load(make(tmp_path).folder, "reference") as encoder:
        assert torch.allclose(encoder.encode(texts(5)).norm(dim=1), torch.ones(len(LENGTHS)), atol=1e-6)
        assert encoder.encode([]).shape == (0, 64)


def test_too_long_texts_and_invalid_ids_are_rejected(tmp_path: Path) -> None:
    with load(make(tmp_path).folder, "reference") as encoder:
        with pytest.raises(PromptTooLong, match="49 tokens, but the model reads at most 48"):
            encoder.encode([[1] * 49])
        for ids in ([], [97], [-1]):
            with pytest.raises(IndexError):
                encoder.encode([[1], ids])


def test_context_length_comes_from_the_folder(tmp_path: Path) -> None:
    tiny = make(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": false}')
    with load(tiny.folder, "reference") as encoder:
        assert encoder.context_length == 20
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 4096}')
    with open_checkpoint(tiny.folder) as checkpoint:
        assert load_encoder(checkpoint, LoadOptions(backend="reference")).context_length == 48
        assert load_encoder(checkpoint, LoadOptions(backend="reference", context_length=9)).context_length == 9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"hidden_act": "gelu"', '"hidden_act": "relu"', "hidden_act = 'relu' is not supported"),
        ('"num_attention_heads": 4', '"num_attention_heads": 5', "5 attention heads do not divide a hidden size of 64"),
        ('"is_decoder": false', '"is_decoder": true', "is_decoder = True is not supported"),
        ('"num_hidden_layers": 3', '"num_hidden_layers": 2', "tensors this version does not use"),
        ('"num_hidden_layers": 3', '"num_hidden_layers": 4', "has no tensor blk.3"),
        ('"type_vocab_size": 2', '"type_vocab_size": 3', "token_type_embeddings.weight has shape"),
    ],
)
def test_unsupported_config_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    tiny = make(tmp_path)
    config = (tmp_path / "config.json").read_text()
    assert old in config
    (tmp_path / "config.json").write_text(config.replace(old, new))
    with pytest.raises((UnsupportedModel, ModelFileError)) as refusal:
        load(tiny.folder, "reference")
    assert message in refusal.value.message


def test_shape_without_cpu_kernels_uses_the_reference_kernels(
    tmp_path: Path, cpu_kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = make(tmp_path, mlp=33)
    with load(tiny.folder, "auto", cpu_kernels) as encoder:
        assert (encoder.encode(texts(6)) - expected(tiny, texts(6), Pooling.MEAN)).abs().max() < 1e-4
    assert "its MLP is 33, not a multiple of 32" in caplog.text
    with pytest.raises(UnsupportedModel, match="its MLP is 33"):
        load(tiny.folder, "cpu", cpu_kernels)


# -- pooling


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, Pooling.CLS),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({"pooling_mode": "mean", "include_prompt": True}, Pooling.MEAN),
    ],
)
def test_pooling_comes_from_the_folder(tmp_path: Path, config: dict[str, object], pooling: Pooling) -> None:
    tiny = make(tmp_path)
    write_modules(tmp_path, config)
    with load(tiny.folder, "reference") as encoder:
        assert (encoder.encode(texts(7)) - expected(tiny, texts(7), pooling)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "pooling_mode_cls_token, "),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({}, "nothing"),
    ],
)
def test_unsupported_pooling_is_refused(tmp_path: Path, config: dict[str, object], named: str) -> None:
    tiny = make(tmp_path)
    write_modules(tmp_path, config)
    with pytest.raises(UnsupportedModel, match=f"asks for the pooling mode {named}"):
        load(tiny.folder, "reference")


def test_unsupported_module_is_refused(tmp_path: Path) -> None:
    tiny = make(tmp_path)
    write_modules(tmp_path, {"pooling_mode": "mean"}, ("Dense", "Normalize"))
    with pytest.raises(UnsupportedModel, match=r"library\.models\.Dense"):
        load(tiny.folder, "reference")


@pytest.mark.parametrize("path", ["../other", "/etc", "a/b", "..", "", 7, None])
def test_module_path_outside_the_folder_is_rejected(tmp_path: Path, path: object) -> None:
    tiny = make(tmp_path)
    write_modules(tmp_path, {"pooling_mode": "mean"})
    modules = (tmp_path / "modules.json").read_text()
    (tmp_path / "modules.json").write_text(modules.replace('"1_Pooling"', json.dumps(path)))
    with pytest.raises(ModelFileError):
        load(tiny.folder, "reference")


def test_module_link_outside_the_folder_is_rejected(tmp_path: Path) -> None:
    tiny = make(tmp_path / "model")
    write_modules(tmp_path / "model", {"pooling_mode": "mean"})
    (tmp_path / "model" / "1_Pooling").rename(tmp_path / "elsewhere")
    (tmp_path / "model" / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelFileError, match="points outside of the checkpoint's folder"):
        load(tiny.folder, "reference")


@pytest.mark.parametrize("content", [b"{}", b"[1]", b"[", b'[], "a": 1', b"[{}]", b"[[]]", b"\xff"])
def test_malformed_modules_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    tiny = make(tmp_path)
    (tmp_path / "modules.json").write_bytes(content)
    with pytest.raises((ModelFileError, UnsupportedModel)):
        load(tiny.folder, "reference")


def test_gpu_vectors_are_close_to_transformers(tmp_path: Path, device: torch.device) -> None:
    tiny, sequences = make(tmp_path, pooling="pooling_mode_mean_tokens"), texts(4, (1, 9))
    card = INTERPRETED if device.type == "cpu" else None
    with open_checkpoint(tiny.folder) as checkpoint:
        encoder = load_encoder(checkpoint, LoadOptions(backend="cuda", card=card))
    with encoder:
        assert (encoder.encode(sequences) - expected(tiny, sequences, Pooling.MEAN)).abs().max() < 2e-2
