"""Quantized copies of a model from transformers, read by transformers and by Inglenook's readers."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

from app.errors import AppError, ModelNotFound, NoSpace
from app.models import quantized_copy
from app.models.quantized_copy import QuantizedCopy, save_quantized
from app.progress import Report, SilentProgress
from quant import bitsandbytes
from quant.errors import ModelFileError, SafetensorsError, UnsupportedQuantization
from quant.kernels.reference import dequantize
from quant.quantize import Quantizer, fp8, int4, is_linear_weight, nf4
from quant.quantized_storage import SECTION, Method
from quant.safetensors_shards import SafetensorsShards
from quant.safetensors_values import decode_plain, values
from quant.tensor import PlainTensor

TOKENIZER = b'{"version": "1.0"}'
FP8, INT4, NF4 = Method("fp8"), Method("int4"), Method("nf4")
QUANTIZED: dict[str, Quantizer] = {
    "fp8": fp8,
    "int4": lambda plain: int4(plain, 64),
    "nf4": nf4,
}  # group size 64, because the smaller matrices have 64 columns


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama in bfloat16, whose embedding is tied, in several files."""
    folder = tmp_path_factory.mktemp("original") / "tiny"
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling.py").write_bytes(b"code")
    return folder


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    """A copy of the original folder, which a test can change."""
    return Path(shutil.copytree(original, tmp_path / "source"))


def tensors(folder: Path) -> dict[str, Tensor]:
    with SafetensorsShards(folder) as checkpoint:
        return {name: values(tensor, checkpoint.data(name)) for name, tensor in checkpoint.tensors.items()}


def expected(folder: Path, method: str) -> dict[str, Tensor]:
    """Return the float32 weights that a quantized copy of the folder must have."""
    with SafetensorsShards(folder) as checkpoint:
        plain = {name: decode_plain(tensor, checkpoint.data(name)) for name, tensor in checkpoint.tensors.items()}
    return {
        name: dequantize(QUANTIZED[method](weight) if is_linear_weight(name, weight.shape) else weight)
        for name, weight in plain.items()
    }


def save(source: Path, target: Path, method: Method = INT4, shard_bytes: int = 40_000) -> QuantizedCopy:
    return save_quantized(source, target, method, SilentProgress(), shard_bytes)


@pytest.mark.parametrize("method", [FP8, INT4], ids=lambda method: method.name)
def test_transformers_reads_the_same_weights(original: Path, tmp_path: Path, method: Method) -> None:
    save(original, tmp_path / "copy", method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about the argument that requests 16-bit weights
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path / "copy", dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
        )
    state = theirs.state_dict()
    ours = expected(original, method.name)
    assert state.keys() == ours.keys() | {"lm_head.weight"}
    for name, weight in ours.items():
        assert torch.equal(state[name], weight.bfloat16()), name


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_copy_is_read_by_the_bitsandbytes_reader(original: Path, tmp_path: Path, nested: bool) -> None:
    save(original, tmp_path / "copy", Method("nf4", nested=nested))
    config = bitsandbytes.BitsAndBytes.read(json.loads((tmp_path / "copy" / "config.json").read_text())[SECTION])
    written, layers = tensors(tmp_path / "copy"), 0
    for name, weight in tensors(original).items():
        if not is_linear_weight(name, tuple(weight.shape)):
            assert torch.equal(written[name], weight)
            continue
        layer = name.removesuffix("weight")
        parts = {key.removeprefix(layer): part for key, part in written.items() if key.startswith(layer)}
        ours = nf4(PlainTensor((weight.shape[0], weight.shape[1]), "BF16", weight), nested=nested)
        assert torch.equal(dequantize(bitsandbytes.decode(layer, parts, config)), dequantize(ours))
        layers += 1
    assert layers == 14


def test_result_describes_the_copy(original: Path, tmp_path: Path) -> None:
    copy = save(original, tmp_path / "copy")
    assert (copy.path, copy.method, copy.group_size, copy.layers) == (tmp_path / "copy", "int4", 64, 14)
    assert copy.original_bytes == sum(tensor.nbytes for tensor in tensors(original).values())
    assert copy.size == sum(path.stat().st_size for path in (tmp_path / "copy").iterdir())
    assert save(original, tmp_path / "second", Method("int4", 32)).group_size == 32


def test_copy_includes_companion_files_but_no_pickles_or_code(original: Path, tmp_path: Path) -> None:
    save(original, tmp_path / "copy", FP8)
    copied = {path.name: path for path in (tmp_path / "copy").iterdir() if not path.name.startswith("model")}
    assert copied.keys() == {"config.json", "generation_config.json", "tokenizer.json"}
    assert copied["tokenizer.json"].read_bytes() == TOKENIZER
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (original, tmp_path / "copy"))
    section = after.pop(SECTION)
    assert before == after
    assert section["ignore"] == ["lm_head", "model.embed_tokens"]


def test_quantized_source_is_refused(original: Path, source: Path, tmp_path: Path) -> None:
    save(original, tmp_path / "copy", FP8)
    with pytest.raises(AppError, match=r"already quantized: its config\.json"):
        save(tmp_path / "copy", tmp_path / "again")
    config = tmp_path / "copy" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {SECTION: None}))
    with pytest.raises(AppError, match=r"already quantized: .*down_proj\.weight is of type F8_E4M3"):
        save(tmp_path / "copy", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_existing_target_is_refused(original: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    for name in ("link", "folder"):
        with pytest.raises(AppError, match="already exists"):
            save(original, tmp_path / name)
    assert not (tmp_path / "nowhere").exists()
    assert list((tmp_path / "folder").iterdir()) == []


def test_source_without_a_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="is not a folder"):
        save(tmp_path / "absent", tmp_path / "copy")
    (source / "config.json").write_text("[]")
    with pytest.raises(ModelFileError, match=r"config\.json: it is not an object"):
        save(source, tmp_path / "copy")
    (source / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        save(source, tmp_path / "copy")
    (source / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(SafetensorsError, match="outside of"):
        save(source, tmp_path / "copy")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_group_size_that_does_not_divide_the_columns_is_refused(original: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedQuantization, match="Groups of 128"):
        save(original, tmp_path / "copy", Method("int4", 128))
    assert list(tmp_path.iterdir()) == []


def test_space_is_checked_before_writing(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=70_000))
    with pytest.raises(NoSpace, match=r"70\.0 kB free") as caught:
        save(original, tmp_path / "copy")
    assert "another disk" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


class Interrupted(SilentProgress):
    """Raises KeyboardInterrupt after several tensors."""

    def __init__(self) -> None:
        self.reports = 0

    def task(self, label: str, total: int | None, *, unit: object = "bytes") -> "Interrupted":  # type: ignore[override]
        return self

    def __enter__(self) -> Report:
        return self.count

    def __exit__(self, *problem: object) -> None: ...

    def count(self, done: int) -> None:
        self.reports += 1
        if self.reports == 9:
            raise KeyboardInterrupt


def test_interrupted_copy_leaves_no_files(original: Path, tmp_path: Path) -> None:
    progress = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        save_quantized(original, tmp_path / "copy", FP8, progress, 20_000)
    assert progress.reports == 9
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_process_are_replaced(original: Path, tmp_path: Path) -> None:
    (tmp_path / ".copy.partial").mkdir()
    (tmp_path / ".copy.partial" / "model.safetensors").write_bytes(b"torn")
    save(original, tmp_path / "copy", FP8)
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}
    assert not (tmp_path / "copy" / "model.safetensors").exists()


def test_error_names_a_weight_that_cannot_be_quantized(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tensor: object, data: memoryview) -> PlainTensor:
        return PlainTensor((64, 64), "BF16", torch.full((64, 64), float("nan")))

    monkeypatch.setattr(quantized_copy, "decode_plain", broken)
    with pytest.raises(ModelFileError, match=r"tiny: model\.layers\.\d\..*\.weight: A weight has numbers"):
        save(original, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []
