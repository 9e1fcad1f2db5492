"""GPU checks of `ingle doctor`: the driver, torch's build, the C compiler that kernels need, and the GPU.

The checks are independent, so that each of several problems gets a remedy. They import torch, which may be broken.
"""

from pathlib import Path

from app.doctor.check_result import CheckResult
from app.progress import Progress, format_bytes
from app.settings.settings import Settings
from engine.backends.cuda.driver import driver_version, too_old_for

_PCI = Path("/sys/bus/pci/devices")
# PCI id of the vendor NVIDIA, and the start of the PCI class of display controllers
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_INSTALL = "Install torch for CUDA: https://pytorch.org/get-started/locally/"
_BROKEN = "Reinstall torch."
_NO_GPU = "not needed: there is no GPU"


def driver(settings: Settings, progress: Progress) -> CheckResult:
    name, version = "GPU driver", driver_version()
    if version is None:
        if not _has_nvidia_card():
            return CheckResult(name, "ok", "not needed: there is no NVIDIA GPU")
        remedy = "Install NVIDIA's driver, and restart the machine."
        return CheckResult(name, "warn", "this machine has an NVIDIA GPU, but no driver is loaded", remedy)
    try:
        cuda = _torch_cuda(progress)
    except (ImportError, OSError, RuntimeError):
        cuda = None  # the check of the build reports the error
    if least := too_old_for(cuda, version):
        found = f"{version} is too old for CUDA {cuda}, which torch is built for"
        return CheckResult(
            name, "warn", found, f"Update the driver to {least} or newer, or install torch for an older CUDA."
        )
    return CheckResult(name, "ok", version or "loaded")


def torch_build(settings: Settings, progress: Progress) -> CheckResult:
    """Check that torch can use the GPUs of this machine."""
    name = "torch build"
    try:
        cuda = _torch_cuda(progress)
        import torch

        if driver_version() is None:
            return CheckResult(name, "ok", f"for CUDA {cuda}" if cuda else "for the CPU only; there is no GPU")
        if cuda is None:
            return CheckResult(
                name, "warn", f"torch {torch.__version__} is for the CPU only, and there is a GPU", _INSTALL
            )
        if missing := _cards_without_code():
            return CheckResult(name, "warn", f"for CUDA {cuda}, which has no code for {missing}", _INSTALL)
    except (ImportError, OSError, RuntimeError) as problem:
        return CheckResult(name, "warn", f"torch cannot be used: {problem}", _BROKEN)
    return CheckResult(name, "ok", f"for CUDA {cuda}")


def compiler(settings: Settings, progress: Progress) -> CheckResult:
    name = "C compiler"
    if driver_version() is None:
        return CheckResult(name, "ok", _NO_GPU)
    try:
        from engine.backends.cuda.compiler import prepare_compiler
        from engine.errors import NoCompiler

        with progress.task("Testing the C compiler", None):
            prepare_compiler()
    except NoCompiler as problem:
        return CheckResult(name, "warn", f"{problem.message}: the CPU engine will be used", problem.remedy)
    except (ImportError, OSError, RuntimeError) as problem:
        return CheckResult(name, "warn", f"Triton cannot be used: {problem}", _BROKEN)
    return CheckResult(name, "ok", "works: Triton can compile kernel launchers with it")


def card(settings: Settings, progress: Progress) -> CheckResult:
    try:
        with progress.task("Looking for a GPU", None):
            import torch  # noqa: F401  # may be installed but broken

            from engine.backends.cuda.discovery import Unusable, find_gpu

            _, _, number = settings.device.partition(":")
            found = find_gpu(int(number) if number else None)
    except (ImportError, OSError, RuntimeError) as problem:
        return CheckResult("GPU", "warn", f"torch cannot be used: {problem}", _BROKEN)
    if not isinstance(found, Unusable):
        there = found.card
        return CheckResult("GPU", "ok", f"{there.name}, {format_bytes(there.memory_bytes)}, sm_{there.architecture}")
    if not found.is_present:
        return CheckResult("GPU", "ok", "none found: the CPU engine will be used")
    return CheckResult("GPU", "warn", f"{found.reason}: the CPU engine will be used", found.remedy)


def _torch_cuda(progress: Progress) -> str | None:
    """Return the CUDA version that torch is built for, such as 12.8; None: it is built for the CPU."""
    with progress.task("Looking for a GPU", None):
        import torch

        return torch.version.cuda


def _has_nvidia_card() -> bool:
    """Whether Linux lists an NVIDIA display controller. False on other systems."""
    for device in _PCI.glob("*"):
        try:
            vendor, kind = ((device / entry).read_text(encoding="ascii") for entry in ("vendor", "class"))
        except (OSError, UnicodeDecodeError):
            continue
        if vendor.strip() == _NVIDIA and kind.startswith(_DISPLAY):
            return True
    return False


def _cards_without_code() -> str:
    """Return the GPUs that torch cannot use, by architecture.

    torch contains neither machine code for them nor code that the driver can compile.
    """
    import torch

    built = torch.cuda.get_arch_list() if torch.cuda.is_available() else []
    numbers = [(name.partition("_")[0], name.partition("_")[2].rstrip("af")) for name in built]
    versions = [(kind, int(number)) for kind, number in numbers if number.isdecimal()]

    def has_code(major: int, minor: int) -> bool:
        own = 10 * major + minor
        return any(version <= own and (kind == "compute" or version // 10 == major) for kind, version in versions)

    capabilities = [
        torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count() if built else 0)
    ]
    return ", ".join(f"sm_{10 * major + minor}" for major, minor in capabilities if not has_code(major, minor))
