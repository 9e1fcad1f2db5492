import pytest
import torch

from quant.errors import ModelFileError
from quant.layer_tensors import LayerTensors

GIVEN = LayerTensors("a.b", {"w": torch.zeros(2, 3), "empty": torch.zeros(0, 3), "bias": torch.zeros(2)})
FLOAT = (torch.float32,)


def test_take_returns_the_named_tensor() -> None:
    assert GIVEN.take("w", FLOAT, 2, None).shape == (2, 3)
    assert "w" in GIVEN
    assert "v" not in GIVEN


@pytest.mark.parametrize(
    ("name", "types", "shape", "problem"),
    [
        ("v", FLOAT, (2, 3), "a.b.v is missing"),
        ("w", (torch.int32, torch.uint8), (2, 3), "a.b.w is of type float32, not int32 or uint8"),
        ("w", FLOAT, (2, 4), r"a.b.w has shape \[2, 3\], not \[2, 4\]"),
        ("w", FLOAT, (2,), r"not \[2\]"),
        ("w", FLOAT, (2, 3, None), r"not \[2, 3, n\]"),
        ("empty", FLOAT, (None, 3), r"has shape \[0, 3\], not \[n, 3\]"),
        ("empty", FLOAT, (0, 3), "has shape"),
    ],
)
def test_take_error_names_the_problem(
    name: str, types: tuple[torch.dtype, ...], shape: tuple[int | None, ...], problem: str
) -> None:
    with pytest.raises(ModelFileError, match=problem):
        GIVEN.take(name, types, *shape)


def test_tensor_that_was_not_taken_is_rejected() -> None:
    given = LayerTensors("a.b", {"w": torch.zeros(1), "x": torch.zeros(1), "bias": torch.zeros(1)})
    given.take("w", FLOAT, 1)
    with pytest.raises(ModelFileError, match=r"a\.b\.x does not belong"):
        given.finish()
    given.take("x", FLOAT, 1)
    given.finish()
