"""Every decoder family on a GPU against the reference: cached prefix, prefill, decode, and batches."""

from pathlib import Path

import pytest
import torch

from tests.engine.backends.cuda.two_devices import TwoDevices, check_close, gpu
from tests.engine.models.family_checkpoints import FAMILIES, make


@pytest.mark.share(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_close_to_the_reference(tmp_path: Path, name: str, device: torch.device) -> None:
    both = TwoDevices.of(make(tmp_path, name, "folder").path, gpu(device))
    check_close(*both.prefill_then_decode())
