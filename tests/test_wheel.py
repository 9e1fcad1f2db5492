"""The installed wheel contains one private folder, a launcher, and all data files."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.guarded import sitecustomize

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that `pip install .` puts into site-packages, without dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    with sitecustomize.lifted():  # pip downloads what builds the wheel
        subprocess.run(command, check=True)
    (wheel,) = folder.glob("inglenook-*.whl")
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run(site: Path, *arguments: str) -> str:
    """Run Python outside of the checkout, in a folder that contains another package named `app`."""
    elsewhere = site.parent / "elsewhere"
    (elsewhere / "app").mkdir(parents=True, exist_ok=True)
    (elsewhere / "app" / "__init__.py").write_text("raise ImportError('the wrong app')")
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_site_packages_gets_one_folder(site: Path) -> None:
    names = {path.name for path in site.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"inglenook"}
    assert {path.name for path in (site / "inglenook").iterdir()} == {
        "__init__.py", "__main__.py", "app", "engine", "quant", "tui",
    }  # fmt: skip


def test_every_file_of_the_packages_is_in_the_wheel(site: Path) -> None:
    for folder in ("app", "engine", "quant", "tui"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert (site / "inglenook" / path.relative_to(ROOT)).is_file(), path


def test_launcher_starts_the_installed_program(site: Path) -> None:
    assert "ingle 0." in run(site, "-m", "inglenook", "--version")
    assert "pull" in run(site, "-m", "inglenook", "--help")


def test_spawned_process_unpickles_objects(site: Path) -> None:
    script = site.parent / "spawning.py"
    script.write_text(
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    import inglenook\n"
        "    from engine.request import SamplingParams\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(repr, (SamplingParams(seed=4242),)))\n"
    )
    assert "seed=4242" in run(site, str(script))


def test_other_process_unpickles_objects_after_one_import(site: Path) -> None:
    """One process pickles an object, and a separate process unpickles it."""
    make = (
        "import inglenook, pickle\n"
        "from engine.request import SamplingParams\n"
        "print(pickle.dumps(SamplingParams(seed=7)).hex())"
    )
    pickled = run(site, "-P", "-c", make).strip()
    read = f"import inglenook, pickle; print(pickle.loads(bytes.fromhex({pickled!r})))"
    assert "seed=7" in run(site, "-P", "-c", read)
