"""`ingle doctor`: the results of its checks on good and bad machines, and its exit status."""

import json
import os
import shutil
import sys
import tomllib
from contextlib import closing
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from app.cli import ingle
from app.doctor import checks, gpu_checks
from app.doctor.check_result import CheckResult
from app.doctor.checks import PYTHON_RANGE, TORCH_RANGE, run_checks
from app.process.listening import ListeningSockets
from app.progress import SilentProgress
from app.settings.settings import Settings
from engine.backends.cuda import compiler
from engine.errors import NoCompiler
from quant.cpu import tiers
from quant.cpu.tiers import choose
from tests.app.models.fake_hub import serve
from tests.app.models.tiny_model import settings_in

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def _result(check: checks.Check, settings: Settings) -> CheckResult:
    return check(settings, SilentProgress())


def test_version_ranges_match_pyproject() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    (low, high), (torch_low, torch_high) = (
        [".".join(map(str, bound)) for bound in bounds] for bounds in (PYTHON_RANGE, TORCH_RANGE)
    )
    assert project["requires-python"] == f">={low},<{high}"
    assert f"torch>={torch_low},<{torch_high}" in project["dependencies"]


def test_all_checks_run_on_this_machine(tmp_path: Path, smollm2: Path) -> None:
    results = list(run_checks(settings_in(tmp_path, model=str(smollm2)), SilentProgress()))
    assert [result.name for result in results] == [
        "Python",
        "torch",
        "CPU",
        "CPU kernels",
        "memory",
        "disk",
        "models folder",
        "Hub cache",
        "cache on disk",
        "default model",
        "Hub",
        "pip",
        "servers",
        "port",
        "GPU driver",
        "torch build",
        "C compiler",
        "GPU",
    ]
    statuses = {result.name: result.status for result in results}
    assert statuses["torch"] == statuses["models folder"] == statuses["default model"] == "ok"
    assert statuses["Hub"] == "warn"
    assert all(result.found for result in results)


def test_hub_is_not_contacted_in_offline_mode(tmp_path: Path) -> None:
    with serve() as hub:
        settings = settings_in(tmp_path, hub_endpoint=f"{hub.address}")
        assert _result(checks._hub, settings) == CheckResult("Hub", "ok", "127.0.0.1 responds")
    asked = len(hub.requests)
    assert _result(checks._hub, settings_in(tmp_path, offline=True)).status == "ok"
    assert len(hub.requests) == asked == 1


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.1", "fail"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.14.0", "fail"), ("?", "fail")],
)
def test_torch_version_out_of_range_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, status: str
) -> None:
    monkeypatch.setattr(checks, "version", lambda name: version)
    result = _result(checks._torch, settings_in(tmp_path))
    assert result.status == status
    assert bool(result.remedy) == (status == "fail")


def test_kernel_tier_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = _result(checks._kernels, settings_in(tmp_path, cache_dir=tmp_path))
    assert result.status == "ok"
    assert result.found.startswith(f"{choose('auto').tier}, to be compiled when a model is first loaded")
    assert _result(checks._kernels, settings_in(tmp_path, cache_dir=tmp_path, cpu_tier="portable")).found.startswith(
        "portable, "
    )
    monkeypatch.setattr(tiers, "host_features", lambda: frozenset({"sse2"}))
    result = _result(checks._kernels, settings_in(tmp_path, cpu_tier="avx2"))
    assert result.status == "fail"
    assert "no avx2" in result.found
    assert "--cpu-tier" in result.found
    assert result.remedy == "Set cpu_tier to one of: auto, portable."


def test_missing_torch_is_a_failed_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(checks, "version", missing)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert _result(checks._torch, settings_in(tmp_path)).status == "fail"
    assert _result(gpu_checks.card, settings_in(tmp_path)).status == "warn"


def _with_gpu(
    monkeypatch: pytest.MonkeyPatch, version: str | None, cuda: str | None, built: tuple[str, ...] = ()
) -> None:
    """Simulate a driver, an sm_120 GPU, and a torch build for the given CUDA version and architectures."""
    monkeypatch.setattr(gpu_checks, "driver_version", lambda: version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(built))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (12, 0))


@pytest.mark.parametrize(
    ("version", "cuda", "problem"),
    [
        (None, None, None),
        ("550.54.14", "12.8", None),
        ("580.65", "13.0", None),
        ("", "13.0", None),
        ("470.82", None, None),  # the check of the torch build reports the problem
        ("550.54.14", "13.0", "too old for CUDA 13.0"),
        ("470.82", "12.6", "too old for CUDA 12.6"),
    ],
)
def test_driver_too_old_for_torch_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None, cuda: str | None, problem: str | None
) -> None:
    _with_gpu(monkeypatch, version, cuda)
    monkeypatch.setattr(gpu_checks, "_PCI", tmp_path)
    result = _result(gpu_checks.driver, settings_in(tmp_path))
    assert (result.status == "warn", bool(result.remedy)) == (problem is not None, problem is not None)
    assert (problem or "") in result.found


def test_gpu_without_a_driver_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_checks, "driver_version", lambda: None)
    monkeypatch.setattr(gpu_checks, "_PCI", tmp_path)
    device = tmp_path / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x040300\n")  # the PCI class of the card's audio device
    assert _result(gpu_checks.driver, settings_in(tmp_path)).status == "ok"
    (device / "class").write_text("0x030000\n")
    assert _result(gpu_checks.driver, settings_in(tmp_path)).status == "warn"


@pytest.mark.parametrize(
    ("cuda", "built", "problem"),
    [
        (None, (), "for the CPU only"),
        ("12.6", ("sm_80", "sm_90"), "no code for sm_120"),
        ("12.8", ("sm_80", "sm_90a", "sm_120"), None),
        ("12.8", ("sm_80", "compute_90"), None),
    ],
)
def test_torch_without_code_for_the_gpu_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str | None, built: tuple[str, ...], problem: str | None
) -> None:
    _with_gpu(monkeypatch, "580.65", cuda, built)
    result = _result(gpu_checks.torch_build, settings_in(tmp_path))
    assert (result.status == "warn", bool(result.remedy)) == (problem is not None, problem is not None)
    assert (problem or "") in result.found


def test_missing_compiler_is_a_warning_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> None:
        raise NoCompiler("this machine has none", "Install one.")

    monkeypatch.setattr(compiler, "prepare_compiler", missing)
    assert _result(gpu_checks.compiler, settings_in(tmp_path)).status == "ok"  # not needed without a GPU
    monkeypatch.setattr(gpu_checks, "driver_version", lambda: "580.65")
    result = _result(gpu_checks.compiler, settings_in(tmp_path))
    assert (result.status, result.remedy) == ("warn", "Install one.")


def test_used_port_is_reported_with_its_program(tmp_path: Path) -> None:
    with closing(ListeningSockets(0)) as sockets:
        settings = settings_in(tmp_path, port=sockets.port, state_dir=tmp_path)
        result = _result(checks._port, settings)
        assert result.status == "warn"
        assert f"pid {os.getpid()}" in result.found
        assert result.remedy
    assert _result(checks._port, settings).status == "ok"
    assert _result(checks._servers, settings).found == "none running"


def test_missing_default_model_is_a_warning_with_the_pull_command(tmp_path: Path) -> None:
    result = _result(checks._default_model, settings_in(tmp_path))
    assert (result.status, result.remedy) == ("warn", "ingle pull smollm2:135m")


def test_invalid_models_folder_is_a_failed_check(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = _result(checks._models_dir, settings_in(tmp_path, models_dir=tmp_path / "file" / "models"))
    assert result.status == "fail"
    assert "--models-dir" in result.remedy


def test_size_and_mode_of_the_disk_cache_are_checked(tmp_path: Path) -> None:
    folder = tmp_path / "kv"

    def result(limit: str = "auto") -> CheckResult:
        return _result(checks._cache, settings_in(tmp_path, kv_disk_dir=folder, kv_disk_gb=limit))

    def keep(size: int) -> None:
        bucket = folder / ("0" * 32) / "00"
        bucket.mkdir(parents=True, exist_ok=True)
        (bucket / "x.run").write_bytes(bytes(size))

    assert result().status == "ok"
    assert result("0.5") == CheckResult("cache on disk", "ok", f"0 B of at most 500.0 MB in {folder}")
    assert result("0") == CheckResult("cache on disk", "ok", f"disabled (--kv-disk-gb), 0 B in {folder}")
    assert not folder.exists()
    keep(1030)
    folder.chmod(0o700)
    assert result("0.000001") == CheckResult("cache on disk", "ok", f"1.0 kB of at most 1.0 kB in {folder}")
    keep(1032)
    assert result("0.000001").status == "warn"
    assert (result("0").status, result("0").remedy) == ("warn", "ingle cache clear deletes it.")
    folder.chmod(0o750)
    assert result().found == f"other users can access {folder}"
    assert result().remedy == f"chmod 700 {folder}"
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "kv"
    assert result().status == "ok"  # the check accepts the path; the engine reports the problem when it writes there


def test_low_memory_and_low_disk_space_are_warnings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1000))
    monkeypatch.setattr(checks, "available_memory", lambda: 1000)
    for check in (checks._disk, checks._memory):
        result = _result(check, settings_in(tmp_path))
        assert result.status == "warn"
        assert result.remedy


def test_fuller_of_two_disks_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings, usage = settings_in(tmp_path), shutil.disk_usage(tmp_path)
    for folder, other in ((settings.models_dir, settings.hub_cache), (settings.hub_cache, settings.models_dir)):
        folder.mkdir(exist_ok=True)
        other.mkdir(exist_ok=True)
        monkeypatch.setattr(
            shutil, "disk_usage", lambda place, full=folder: usage._replace(free=1000 if place == full else 10**12)
        )
        assert _result(checks._disk, settings).found == f"only 1.0 kB free on the disk of {folder}"


def _with_checks(monkeypatch: pytest.MonkeyPatch, *results: CheckResult) -> None:
    monkeypatch.setattr(checks, "CHECKS", [lambda settings, progress, f=f: f for f in results])


GOOD, BAD, WORST = (
    CheckResult("a", "ok", "fine"),
    CheckResult("b", "warn", "hm", "Mend it."),
    CheckResult("c", "fail", "broken"),
)


def test_exit_status_is_1_only_for_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_checks(monkeypatch, GOOD, BAD)
    answer = CliRunner().invoke(ingle, ["doctor"])
    assert answer.exit_code == 0
    assert [line.split() for line in answer.stdout.splitlines()] == [
        ["ok", "a", "fine"],
        ["warn", "b", "hm"],
        ["try:", "Mend", "it."],
    ]
    _with_checks(monkeypatch, GOOD, WORST)
    assert CliRunner().invoke(ingle, ["doctor"]).exit_code == 1


def test_json_option_prints_all_results(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_checks(monkeypatch, GOOD, WORST)
    answer = CliRunner().invoke(ingle, ["doctor", "--json"])
    assert answer.exit_code == 1
    assert json.loads(answer.stdout) == [
        {"name": "a", "status": "ok", "found": "fine", "remedy": ""},
        {"name": "c", "status": "fail", "found": "broken", "remedy": ""},
    ]
