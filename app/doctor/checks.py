"""Checks of this machine for `ingle doctor`. Each check covers one topic and suggests a remedy for a problem.

A check never raises and never changes anything. Only the GPU checks (app/doctor/gpu_checks.py) import torch.
"""

import os
import platform
import re
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from app.doctor.check_result import CheckResult
from app.doctor.gpu_checks import card, compiler, driver, torch_build
from app.errors import AppError, IntegrityError, ModelNotFound, Offline
from app.models.hub import host
from app.models.package_index import pip_command
from app.models.reachability import check_reachable
from app.models.store import ModelStore
from app.process.instance import running_instances
from app.process.listening import ListeningSockets
from app.progress import Progress, format_bytes
from app.service.manager import service_has
from app.settings.settings import Settings
from engine.kv.disk.folder import resolve_limit, segment_files
from engine.kv.disk.quota import SWEEP_FRACTION
from engine.private_folder import private_folder
from engine.system_memory import available_memory
from quant.cpu import tiers
from quant.errors import UnsupportedTier

# The first Python version that works, and the first untested one. pyproject.toml has the same ranges.
PYTHON_RANGE = ((3, 11), (3, 15))
TORCH_RANGE = ((2, 11), (2, 14))

ENOUGH_MEMORY = 2 * 10**9  # bytes for the smallest model, torch, and the rest of a desktop
ENOUGH_DISK = 10**9  # bytes for the default model and its download, with a margin
CPU_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimddp",
    "i8mm",
)


def run_checks(settings: Settings, progress: Progress) -> Iterator[CheckResult]:
    """Run all checks. Each result is yielded as soon as it is known, because some checks take seconds."""
    for check in CHECKS:
        yield check(settings, progress)


def _python(settings: Settings, progress: Progress) -> CheckResult:
    found = f"{platform.python_version()} at {sys.executable}"
    if _within(sys.version_info[:2], PYTHON_RANGE):
        return CheckResult("Python", "ok", found)
    return CheckResult("Python", "warn", f"{found}: not tested", f"Use Python {_words(PYTHON_RANGE)}.")


def _torch(settings: Settings, progress: Progress) -> CheckResult:
    remedy = f"Install torch {_words(TORCH_RANGE)}: pip install 'torch>=2.11,<2.14'"
    try:
        found = version("torch")
    except PackageNotFoundError:
        return CheckResult("torch", "fail", "not installed", remedy)
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and _within((int(numbers[1]), int(numbers[2])), TORCH_RANGE):
        return CheckResult("torch", "ok", found)
    return CheckResult("torch", "fail", f"{found} is out of range", remedy)


def _cpu(settings: Settings, progress: Progress) -> CheckResult:
    description = _first_line(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    flags = _first_line(Path("/proc/cpuinfo"), "flags") or _first_line(Path("/proc/cpuinfo"), "Features")
    features = [feature for feature in CPU_FEATURES if feature in flags.split()]
    return CheckResult(
        "CPU", "ok", f"{description}, {os.cpu_count()} threads, {' '.join(features) or 'features unknown'}"
    )


def _kernels(settings: Settings, progress: Progress) -> CheckResult:
    try:
        from engine.backends.cpu.code_cache import is_compiled
    except ImportError as problem:
        found = f"only the slow reference kernels are available: {problem}"
        return CheckResult("CPU kernels", "warn", found, "pip install numba")
    try:
        target = tiers.choose(settings.cpu_tier)
    except UnsupportedTier as problem:
        return CheckResult("CPU kernels", "fail", f"{problem.message} ({settings.origins['cpu_tier']})", problem.remedy)
    compiled = is_compiled(settings.cache_dir, target)
    state = "compiled" if compiled else "to be compiled when a model is first loaded, in a few seconds"
    return CheckResult("CPU kernels", "ok", f"{target.tier}, {state}")


def _memory(settings: Settings, progress: Progress) -> CheckResult:
    free = available_memory()
    if free >= ENOUGH_MEMORY:
        return CheckResult("memory", "ok", f"{format_bytes(free)} available")
    return CheckResult(
        "memory", "warn", f"only {format_bytes(free)} available", "Close other programs before you run a model."
    )


def _disk(settings: Settings, progress: Progress) -> CheckResult:
    folder = min((settings.models_dir, settings.hub_cache), key=_free_for)
    free = _free_for(folder)
    if free >= ENOUGH_DISK:
        return CheckResult("disk", "ok", f"{format_bytes(free)} free on the disk of {folder}")
    remedy = "Free some space, or choose folders on another disk with INGLE_MODELS_DIR and HF_HUB_CACHE."
    return CheckResult("disk", "warn", f"only {format_bytes(free)} free on the disk of {folder}", remedy)


def _free_for(folder: Path) -> int:
    """Return the number of free bytes on the disk of a folder. The folder need not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _models_dir(settings: Settings, progress: Progress) -> CheckResult:
    folder = settings.models_dir
    try:
        with tempfile.TemporaryFile(dir=private_folder(folder)):
            return CheckResult("models folder", "ok", str(folder))
    except OSError as problem:
        remedy = f"Choose another folder with INGLE_MODELS_DIR (now: {settings.origins['models_dir']})."
        return CheckResult("models folder", "fail", f"{folder} is not writable: {problem.strerror}", remedy)


def _cache(settings: Settings, progress: Progress) -> CheckResult:
    name, folder = "cache on disk", settings.kv_disk_dir
    try:
        mode = stat.S_IMODE(folder.stat().st_mode) if folder.exists() else 0
        kept = sum(file.size for file in segment_files(folder))
        limit = resolve_limit(folder, settings.kv_disk_limit, kept)
    except OSError as problem:
        remedy = f"Choose another folder with INGLE_KV_DISK_DIR (now: {settings.origins['kv_disk_dir']})."
        return CheckResult(name, "warn", f"{folder} cannot be read: {problem.strerror}", remedy)
    if os.name != "nt" and mode & 0o077:
        remedy = f"chmod 700 {shlex.quote(str(folder))}"
        return CheckResult(name, "warn", f"other users can access {folder}", remedy)
    if not limit:
        remedy = "ingle cache clear deletes it." if kept else ""
        found = f"disabled ({settings.origins['kv_disk_gb']}), {format_bytes(kept)} in {folder}"
        return CheckResult(name, "warn" if kept else "ok", found, remedy)
    found = f"{format_bytes(kept)} of at most {format_bytes(limit)} in {folder}"
    if kept > limit + limit // SWEEP_FRACTION:  # writes between two checks of the size may exceed the limit a little
        remedy = "It shrinks the next time a model is used. ingle cache clear deletes it now."
        return CheckResult(name, "warn", found, remedy)
    return CheckResult(name, "ok", found)


def _default_model(settings: Settings, progress: Progress) -> CheckResult:
    try:
        stored = ModelStore(settings).resolve(settings.model, progress)
    except (ModelNotFound, IntegrityError) as problem:
        return CheckResult("default model", "warn", problem.message, problem.remedy)
    except OSError as problem:
        return CheckResult("default model", "warn", f"cannot be read: {problem}")
    return CheckResult("default model", "ok", f"{stored.name} at {stored.path}")


def _hub(settings: Settings, progress: Progress) -> CheckResult:
    if settings.offline:
        return CheckResult("Hub", "ok", f"not checked: offline mode is on ({settings.origins['offline']})")
    try:
        check_reachable(settings.hub_endpoint)
    except Offline as problem:
        remedy = "Check the network. Until then, models of the catalog come from the Python package index."
        return CheckResult("Hub", "warn", problem.message, remedy)
    return CheckResult("Hub", "ok", f"{host(settings)} responds")


def _pip(settings: Settings, progress: Progress) -> CheckResult:
    if command := pip_command():
        return CheckResult("pip", "ok", " ".join(command))
    found = "not found: models cannot be downloaded from the Python package index"
    return CheckResult("pip", "warn", found, "python -m ensurepip")


def _hub_cache(settings: Settings, progress: Progress) -> CheckResult:
    folder = settings.hub_cache
    # The folder need not exist: the first download creates it.
    if os.access(_existing(folder), os.R_OK | os.W_OK | os.X_OK):
        return CheckResult("Hub cache", "ok", str(folder))
    remedy = f"Choose another folder with HF_HUB_CACHE (now: {settings.origins['hub_cache']})."
    return CheckResult("Hub cache", "fail", f"{folder} is not writable", remedy)


def _servers(settings: Settings, progress: Progress) -> CheckResult:
    servers = [f"{server.title} on port {server.port} (pid {server.pid})" for server in running_instances(settings)]
    return CheckResult("servers", "ok", ", ".join(servers) or "none running")


def _port(settings: Settings, progress: Progress) -> CheckResult:
    name, port = "port", settings.port
    if any(server.port == port for server in running_instances(settings)):
        return CheckResult(name, "ok", f"{port} is used by an ingle server")
    try:
        ListeningSockets(port, settings.host).close()
    except AppError as problem:
        if service_has(port, settings):
            return CheckResult(name, "ok", f"{port} belongs to the service of ingle, which a request starts")
        remedy = f"Choose another port with --port or INGLE_PORT (now: {settings.origins['port']})."
        return CheckResult(name, "warn", problem.message, problem.remedy or remedy)
    except OSError as problem:
        remedy = f"Choose a port above 1023 with --port or INGLE_PORT (now: {settings.origins['port']})."
        return CheckResult(name, "warn", f"{port} cannot be used: {problem.strerror}", remedy)
    return CheckResult(name, "ok", f"{port} on {settings.host} is free")


Check = Callable[[Settings, Progress], CheckResult]

CHECKS: tuple[Check, ...] = (
    _python, _torch, _cpu, _kernels, _memory, _disk, _models_dir, _hub_cache, _cache, _default_model, _hub, _pip,
    _servers, _port, driver, torch_build, compiler, card
)  # fmt: skip


def _within(version: tuple[int, ...], bounds: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    return bounds[0] <= version < bounds[1]


def _words(bounds: tuple[tuple[int, int], tuple[int, int]]) -> str:
    (major, first), (_, end) = bounds
    return f"{major}.{first} to {major}.{end - 1}"


def _first_line(path: Path, key: str) -> str:
    """Return the value of the first `key: value` line of a file such as /proc/cpuinfo; empty if there is none."""
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(rf"^{re.escape(key)}\s*:\s*(.*)$", content, re.MULTILINE)
    return match[1] if match else ""
