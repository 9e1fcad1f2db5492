"""Fixtures every part shares: real files, fetched once per machine through the package index and cached."""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import hypothesis
import platformdirs
import pytest
from filelock import FileLock

from app.config import load_settings
from app.models.sources import pull

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

LLAMA_CPP_SOURCE = "llama-cpp-python==0.3.36"


def fetched_folder() -> Path:
    """Where test files that come from the package index are kept between runs."""
    return platformdirs.user_cache_path("inglenook-tests")


def _pip_download(requirement: str, into: Path, *options: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(into),
        *options,
        requirement,
    ]
    subprocess.run(command, check=True)
    return next(path for path in into.iterdir() if path.is_file())


@pytest.fixture(scope="session")
def llama_cpp_models() -> Path:
    """llama.cpp's `models` folder: vocabulary-only GGUF files with token truth, and real chat templates."""
    folder = fetched_folder() / "llama-cpp-0.3.36"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            archive = _pip_download(LLAMA_CPP_SOURCE, Path(scratch), "--no-binary", "llama-cpp-python")
            with tarfile.open(archive) as tar:
                members = [m for m in tar.getmembers() if "/vendor/llama.cpp/models/" in m.name]
                tar.extractall(scratch, members=members, filter="data")
            unpacked = next(Path(scratch).glob("*/vendor/llama.cpp/models"))
            # Another worker may have been faster; both hold the same bytes.
            if not folder.exists():
                os.replace(unpacked, folder)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--requests", type=int, default=2000, help="how many requests the hash model serves")
    parser.addoption("--rules", type=int, default=5000, help="how many rules the block pool's state machine obeys")
    parser.addoption("--mutations", type=int, default=1000, help="how many mutated GGUF files to try")


@pytest.fixture
def requests(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--requests")
    return count


@pytest.fixture
def rules(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--rules")
    return count


@pytest.fixture
def mutations(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--mutations")
    return count


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as `ingle pull` brings it from the package index; fetched once, whoever asks first."""
    folder = fetched_folder()
    settings = load_settings(
        models_dir=folder / "models", hub_cache=folder / "hub", hub_endpoint="http://127.0.0.1:9", offline=False
    )
    return pull("smollm2:135m", settings).path


@pytest.fixture(scope="session")
def cpu_kernels() -> Path:
    """Where compiled CPU kernels are kept between runs, with those of this checkout: compiled once, whoever asks first.

    Tests that run them ask for this, and are skipped only where the processor has not the instructions.
    """
    # Not at the top: most tests need no compiler.
    from engine.cpu.code_cache import load_interpreter
    from quant.cpu.vector import missing_features

    if missing := missing_features():
        pytest.skip(f"this processor has no {', '.join(missing)}")
    folder = fetched_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "cpu-code.lock"):
        load_interpreter(folder)
    return folder
