"""The register of kernels, and what a processor must have for them."""

from typing import Any

import pytest
from llvmlite import binding

import quant.cpu.activations  # noqa: F401  # defines kernels
from quant.cpu.vector import KERNELS, REQUIRED_FEATURES, Emit, kernel, missing_features


def test_a_name_stands_for_one_kernel() -> None:
    def norm_factor(e: Emit, x: Any) -> Any:
        return x

    there = KERNELS["ingle_norm_factor"]
    with pytest.raises(ValueError, match="norm_factor"):
        kernel(norm_factor)
    assert KERNELS["ingle_norm_factor"] is there
    assert there.parameters == ["x", "groups", "epsilon"]


def test_what_a_processor_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = dict.fromkeys(REQUIRED_FEATURES, True)
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: there)
    assert missing_features() == ()
    there["avx512vnni"] = False
    del there["avx512bw"]
    assert set(missing_features()) == {"avx512vnni", "avx512bw"}
