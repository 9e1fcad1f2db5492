"""How this program is called where it is compared, and which one it is."""

from importlib.metadata import PackageNotFoundError, version

OWN_NAME = "ingle"


def own_build(kernels: str) -> str:
    """The version that is installed, and the kernels that it runs with."""
    try:
        return f"inglenook {version('inglenook')}, {kernels} kernels"
    except PackageNotFoundError:
        return f"a checkout of inglenook, {kernels} kernels"
