"""Quantized copies, with and without calibration."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from app.cli import ingle
from app.models import quantized_copy
from app.progress import SilentProgress
from quant.kernels.reference import dequantize
from quant.quantize import int4
from quant.safetensors_shards import SafetensorsShards
from quant.safetensors_values import decode_plain, values
from tests.app.models import tiny_chat

LAYERS = 14


class Heard(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_chat.save(tmp_path / "tiny")
    return tmp_path / "tiny"


def quantize(*arguments: object) -> str:
    threads = torch.get_num_threads()
    try:
        answer = CliRunner().invoke(ingle, ["quantize", *map(str, arguments), "--to", "int4"], catch_exceptions=False)
    finally:
        torch.set_num_threads(threads)
    assert answer.exit_code == 0, answer.output
    return answer.stderr


def scales(folder: Path) -> dict[str, Tensor]:
    with SafetensorsShards(folder) as checkpoint:
        found = {name: values(tensor, checkpoint.data(name)) for name, tensor in checkpoint.tensors.items()}
    return {name: tensor for name, tensor in found.items() if name.endswith("weight_scale")}


def test_quantize_calibrates_by_default(folder: Path, tmp_path: Path) -> None:
    importance = quantized_copy.measure(folder, SilentProgress())
    assert len(importance) == LAYERS
    assert "is not calibrated" not in quantize(folder, tmp_path / "measured")
    quantize(folder, tmp_path / "plain", "--no-calibration")
    written = {name: scales(tmp_path / name) for name in ("measured", "plain")}
    with SafetensorsShards(folder) as checkpoint:
        for name, counts in importance.items():
            weight = decode_plain(checkpoint.tensors[name], checkpoint.data(name))
            for kind, given in (("measured", counts), ("plain", None)):
                assert torch.equal(written[kind][f"{name}_scale"], int4(weight, 32, given).scale.values().bfloat16())
            error = [
                ((dequantize(int4(weight, 32, given)) - weight.values).square() * counts).sum()
                for given in (counts, None)
            ]
            assert error[0] < error[1]


def test_model_that_cannot_run_is_quantized_without_calibration(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    heard = Heard()
    assert quantized_copy.measure(folder, heard) == {}
    [line] = heard.lines
    assert "is not calibrated" in line
    assert "tokenizer.json" in line
    assert line in " ".join(quantize(folder, tmp_path / "copy").split())
    quantize(folder, tmp_path / "plain", "--no-calibration")
    torch.testing.assert_close(scales(tmp_path / "copy"), scales(tmp_path / "plain"), rtol=0, atol=0)
