"""A model file of a few thousand bytes and its catalog entry, for tests of the store and the sources."""

import hashlib
from pathlib import Path

from app.models.catalog import Catalog, CatalogEntry, HubSource, PackageSource, Sampling, Source
from app.settings.settings import Settings, load_settings

CONTENT = bytes(range(256)) * 40
HUB = HubSource("org/tiny-GGUF", "0123456789abcdef0123456789abcdef01234567", "tiny.Q4_0.gguf")
PACKAGE = PackageSource("tiny-weights==1.0", "tiny_weights/tiny.Q4_0.gguf", 1 << 20)


def entry(*sources: Source, content: bytes = CONTENT) -> CatalogEntry:
    """Return a catalog entry whose file has this content."""
    return CatalogEntry(
        name="tiny:1k",
        aliases=("tiny",),
        title="Tiny",
        license="Apache-2.0",
        quantization="Q4_0",
        file="tiny.Q4_0.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        sampling=Sampling(temperature=0.2, top_p=0.9),
        sources=sources or (HUB, PACKAGE),
    )


def catalog(*sources: Source) -> Catalog:
    return Catalog((entry(*sources),))


def settings_in(folder: Path, **more: object) -> Settings:
    """Return settings with all folders below `folder`, and a hub address that refuses connections."""
    chosen: dict[str, object] = {
        "models_dir": folder / "models",
        "hub_cache": folder / "hub",
        "ollama_dir": folder / "ollama",
        "lmstudio_dir": folder / "lmstudio",
        "hub_endpoint": "http://127.0.0.1:9",
        "offline": False,
    }
    return load_settings(**{**chosen, **more})


def files_below(folder: Path) -> set[str]:
    """Return the names of all files below a folder, except for locks."""
    return {path.name for path in folder.rglob("*") if not path.is_dir() and path.suffix != ".lock"}
