import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from quant.ggml_blocks import decode
from quant.ggml_types import ggml_types
from quant.kernels.reference import ROW_TILE
from quant.linear import ReferenceBackend
from quant.tensor import BlockTensor

KINDS = {kind.name: kind for kind in ggml_types().values()}


def weight(name: str, rows: int, columns: int) -> BlockTensor:
    values = np.random.default_rng().standard_normal((rows, columns), np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    return decode(KINDS[name], memoryview(raw.tobytes()), (rows, columns))


@pytest.fixture(params=[True, False], ids=["kept", "unpacked at each use"])
def backend(request: pytest.FixtureRequest) -> ReferenceBackend:
    return ReferenceBackend(keep_dequantized=request.param)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tokens", [1, 2, ROW_TILE, ROW_TILE + 1, 37])
def test_forward_equals_the_product_of_dequantized_weights(backend: ReferenceBackend, name: str, tokens: int) -> None:
    layer = backend.linear([weight(name, 75, 160)])
    x = torch.randn(tokens, 160)
    torch.testing.assert_close(layer.forward(x), x @ layer.dequantize().T, rtol=1e-5, atol=1e-4)
    assert (layer.inputs, layer.outputs) == (160, 75)


def test_fused_layer_has_segments_of_different_types(backend: ReferenceBackend) -> None:
    segments = [weight("Q4_1", 33, 64), weight("Q8_0", 7, 64), weight("F16", 10, 64)]
    fused = backend.linear(segments)
    x = torch.randn(5, 64)
    apart = torch.cat([backend.linear([segment]).forward(x) for segment in segments], dim=1)
    torch.testing.assert_close(fused.forward(x), apart, rtol=1e-5, atol=1e-5)
    assert fused.outputs == 50


def test_keep_dequantized_does_not_change_bits() -> None:
    segment, x = weight("Q4_0", 100, 96), torch.randn(20, 96)
    kept, unpacked = (ReferenceBackend(keep_dequantized=keep).linear([segment]) for keep in (True, False))
    assert torch.equal(kept.forward(x), unpacked.forward(x))


@pytest.mark.parametrize(("rows", "columns"), [(576, 1536), (33, 577), (1, 64), (1000, 32)])
def test_rows_do_not_depend_on_other_rows(rows: int, columns: int) -> None:
    layer = ReferenceBackend(keep_dequantized=True).linear([weight("F32", rows, columns)])
    x = torch.randn(45, columns)
    together = layer.forward(x)
    for start, stop in [(0, 1), (7, 9), (8, 40), (44, 45), (3, 20)]:
        assert torch.equal(layer.forward(x[start:stop]), together[start:stop])


def test_nan_in_one_row_does_not_affect_other_rows() -> None:
    layer = ReferenceBackend(keep_dequantized=True).linear([weight("Q8_0", 20, 64)])
    x = torch.randn(10, 64)
    clean = layer.forward(x)
    x[4] = torch.nan
    poisoned = layer.forward(x)
    keep = torch.arange(10) != 4
    assert torch.equal(poisoned[keep], clean[keep])
    assert poisoned[4].isnan().all()


def test_empty_input_gives_empty_output(backend: ReferenceBackend) -> None:
    empty: Tensor = backend.linear([weight("Q4_0", 6, 32)]).forward(torch.empty(0, 32))
    assert empty.shape == (0, 6)


def test_embedding_rows_equal_the_weight_rows(backend: ReferenceBackend) -> None:
    layer = backend.linear([weight("Q8_0", 12, 64)])
    ids = torch.tensor([11, 0, 0, 5])
    assert torch.equal(layer.rows(ids), layer.dequantize()[ids])
