"""Kernels are compiled into a folder for a card that is not there."""

from pathlib import Path

from tests.gpu.compiled import MOST_BYTES, folder_bytes
from tests.kernels.test_ahead_of_time import run


def test_kernels_of_a_model_are_compiled_into_a_small_folder(tmp_path: Path) -> None:
    done = run("tests.gpu.compiled", str(tmp_path), "--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {path.stem for path in tmp_path.rglob("*.cubin")}
    assert {"_norm_kernel", "_rope_store_kernel"} <= kernels
    assert 0 < folder_bytes(tmp_path) < MOST_BYTES
