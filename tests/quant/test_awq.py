import pytest
import torch

from quant.awq import AWQ, decode
from quant.errors import ModelFileError, UnsupportedQuantization
from quant.kernels.reference import dequantize

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def test_hand_made_word_is_decoded() -> None:
    """Half-byte i of a word holds row (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    tensors = {
        "qweight": torch.tensor([[0x76543210]], dtype=torch.int32),
        "qzeros": torch.tensor([[0x11111113]], dtype=torch.int32),
        "scales": torch.full((1, 8), 2.0, dtype=torch.float16),
    }
    values = dequantize(decode("l", tensors, AWQ(group=128))).flatten().tolist()
    assert values == [2 * (0 - 3), 2 * (4 - 1), 2 * (1 - 1), 2 * (5 - 1), 2 * (2 - 1), 2 * (6 - 1), 2 * (3 - 1), 2 * 6]


def test_quantization_config_is_read() -> None:
    assert AWQ.read(CONFIG) == AWQ(128)
    assert AWQ.read(CONFIG | {"group_size": -1, "version": "GEMM"}) == AWQ(None)
    assert AWQ.read({"quant_method": "awq", "bits": 4, "group_size": 32, "format": "gemm"}) == AWQ(32)


@pytest.mark.parametrize("change", [{"bits": 8}, {"version": "gemv"}, {"backend": "llm-awq"}, {"zero_point": False}])
def test_error_names_unsupported_values(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedQuantization, match=f"quantization_config.{next(iter(change))}"):
        AWQ.read(CONFIG | change)


def test_missing_section_is_rejected() -> None:
    with pytest.raises(ModelFileError, match="quantization_config is missing, not an object"):
        AWQ.read(None)
