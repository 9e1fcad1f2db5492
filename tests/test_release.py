"""The release script renders valid packages, and the man page covers every command."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from app.cli import ingle

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://git.example/me/inglenook"
DOWNLOADS = f"{REPOSITORY}/releases/download/v7.8.9"
WHEEL = "inglenook-7.8.9-py3-none-any.whl"
METADATA = """\
Metadata-Version: 2.4
Name: inglenook
Version: 7.8.9
Summary: Runs models.
License-Expression: Apache-2.0
Requires-Python: <3.15,>=3.11
"""
PROGRAM = "import sys\ndef main():\n    print(*sys.argv[1:])\n    return 5\n"


def write_wheel(path: Path) -> None:
    """Write a wheel whose `ingle` prints its arguments and ends with status 5."""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("fake_ingle.py", PROGRAM)
        folder = "inglenook-7.8.9.dist-info"
        wheel.writestr(f"{folder}/METADATA", METADATA)
        wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{folder}/entry_points.txt", "[console_scripts]\ningle = fake_ingle:main\n")
        wheel.writestr(f"{folder}/RECORD", "")


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "packaging/release.py"), "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def validate(*command: str) -> None:
    """Run a validator if this machine has it. It must find nothing."""
    if shutil.which(command[0]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a release with a fake wheel."""
    folder = tmp_path_factory.mktemp("release")
    write_wheel(folder / WHEEL)
    (folder / "requirements.txt").write_text("torch==2.13.0 \\\n    --hash=sha256:00\n")
    (folder / "requirements-cpu.txt").write_text("click==8.5.1 \\\n    --hash=sha256:00\n")
    for name in ("ingle.1", "inglenook.svg", "ingle-7.8.9-windows.zip"):
        (folder / name).write_text(name)
    done = release(folder, "--repository", REPOSITORY, "--step", "render", "--step", "summary")
    assert done.returncode == 0, done.stderr
    assert "Nothing was published." in done.stdout
    return folder


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shell_array(script: Path, name: str) -> list[str]:
    command = f'source "{script}" && printf "%s\\n" "${{{name}[@]}}"'
    return subprocess.run(["bash", "-euc", command], capture_output=True, text=True, check=True).stdout.splitlines()


def test_templates_leave_no_markup(rendered: Path) -> None:
    names = [path for path in rendered.rglob("*") if path.is_file() and path.suffix not in (".whl", ".zip")]
    assert len(names) >= 14
    for path in names:
        assert not re.search(r"\{\{|\{%|%\}", path.read_text()), path


def test_pkgbuild_names_each_source_with_its_hash(rendered: Path) -> None:
    script = rendered / "aur/PKGBUILD"
    assert shell_array(script, "pkgver") == ["7.8.9"]
    assert shell_array(script, "depends") == ["python>=3.11", "python<3.15"]
    sources = shell_array(script, "source")
    assert f"{DOWNLOADS}/{WHEEL}" in sources
    names = [source.rpartition("/")[2] for source in sources]
    assert shell_array(script, "sha256sums") == [digest(rendered / name) for name in names]


def test_srcinfo_repeats_the_pkgbuild(rendered: Path) -> None:
    lines = (rendered / "aur/.SRCINFO").read_text().splitlines()
    fields = [line.strip().partition(" = ")[::2] for line in lines if line]
    for name in ("pkgver", "pkgdesc", "url", "arch", "license", "depends", "makedepends", "noextract", "options",
                 "optdepends", "source", "sha256sums"):  # fmt: skip
        assert [value for key, value in fields if key == name] == shell_array(rendered / "aur/PKGBUILD", name), name


def test_formula_contains_addresses_and_hashes(rendered: Path) -> None:
    path = rendered / "homebrew/inglenook.rb"
    formula = path.read_text()
    pairs = re.findall(r'url "([^"]+)".*\n\s+sha256 "([0-9a-f]{64})"', formula)
    names = [WHEEL, "requirements.txt", "ingle.1"]
    assert pairs == [(f"{DOWNLOADS}/{name}", digest(rendered / name)) for name in names]
    assert 'desc "Runs models"' in formula
    assert len(re.findall(r"^\s*(?:class|def|test do|resource .* do)|\bstage do$", formula, re.MULTILINE)) == len(
        re.findall(r"^\s*end$", formula, re.MULTILINE)
    )
    if shutil.which("ruby"):
        subprocess.run(["ruby", "-c", path], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("suffix", "kind", "fields"),
    [
        ("", "version", {"DefaultLocale"}),
        (".installer", "installer", {"InstallerType", "NestedInstallerType", "NestedInstallerFiles", "Installers"}),
        (".locale.en-US", "defaultLocale",
         {"PackageLocale", "Publisher", "PackageName", "License", "ShortDescription"}),
    ],
)  # fmt: skip
def test_winget_manifests_have_the_required_fields(rendered: Path, suffix: str, kind: str, fields: set[str]) -> None:
    manifest = yaml.safe_load((rendered / f"winget/Inglenook.Inglenook{suffix}.yaml").read_text())
    required = {"PackageIdentifier", "PackageVersion", "ManifestType", "ManifestVersion"} | fields
    assert required <= set(manifest)
    assert (manifest["PackageVersion"], manifest["ManifestType"]) == ("7.8.9", kind)
    if kind == "installer":
        (installer,) = manifest["Installers"]
        assert installer["InstallerUrl"] == f"{DOWNLOADS}/ingle-7.8.9-windows.zip"
        assert installer["InstallerSha256"] == digest(rendered / "ingle-7.8.9-windows.zip").upper()


def test_desktop_file_starts_the_program_in_a_terminal(rendered: Path) -> None:
    lines = (rendered / "inglenook.desktop").read_text().splitlines()
    assert lines[0] == "[Desktop Entry]"
    assert {"Type=Application", "Exec=ingle", "Terminal=true", "Icon=inglenook", "Comment=Runs models"} <= set(lines)
    validate("desktop-file-validate", str(rendered / "inglenook.desktop"))


@pytest.mark.parametrize(("kind", "lock"), [("cpu", "requirements-cpu.txt"), ("cuda", "requirements.txt")])
def test_dockerfile_needs_a_key_and_no_root(rendered: Path, kind: str, lock: str) -> None:
    text = (rendered / f"Dockerfile.{kind}").read_text().replace("\\\n", "")
    instructions = [line.partition(" ")[::2] for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert {"FROM", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"} <= {name for name, _ in instructions}
    assert ("USER", "10001") in instructions
    assert ("COPY", f"{lock} {WHEEL} /tmp/") in instructions
    assert "INGLE_HOST=0.0.0.0" in text
    assert "INGLE_API_KEY=" not in text
    assert ("torch==2.13.0" in text) == (kind == "cpu")


def test_sums_cover_every_published_file(rendered: Path) -> None:
    lines = (rendered / "SHA256SUMS").read_text().splitlines()
    published = {path.name for path in rendered.iterdir() if path.is_file()} - {"SHA256SUMS"}
    sums = {name: value for value, name in (line.split("  ") for line in lines)}
    assert sums == {name: digest(rendered / name) for name in published}


def test_render_without_a_wheel_fails(tmp_path: Path) -> None:
    done = release(tmp_path, "--repository", REPOSITORY, "--step", "render")
    assert done.returncode == 1
    assert "0 files" in done.stderr


# -- the launcher for Windows


def test_first_start_installs_the_program(tmp_path: Path) -> None:
    write_wheel(tmp_path / WHEEL)
    program = tmp_path / "ingle.zip"
    with zipfile.ZipFile(program, "w") as archive:
        archive.write(ROOT / "packaging/windows/__main__.py", "__main__.py")
        archive.write(tmp_path / WHEEL, WHEEL)
        archive.writestr("requirements.txt", "")
    environment = {**os.environ, "LOCALAPPDATA": str(tmp_path / "local")}
    messages = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, program, "run", "a b"], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (5, "run a b\n"), done.stderr
        messages.append(done.stderr)
    assert "Installing Inglenook" in messages[0]
    assert messages[1] == ""
    assert (tmp_path / "local/Programs/inglenook/7.8.9").is_dir()


# -- the man page


@pytest.fixture(scope="module")
def man_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = [sys.executable, str(ROOT / "packaging/man_page.py"), "7.8.9", "2026-01-31"]
    path = tmp_path_factory.mktemp("man") / "ingle.1"
    path.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return path


def commands_of(group: click.Group, path: str = "ingle") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        if (command := group.get_command(context, name)) is not None:
            yield f"{path} {name}", command
            if isinstance(command, click.Group):
                yield from commands_of(command, f"{path} {name}")


def test_man_page_lists_every_command_and_option(man_page: Path) -> None:
    text = man_page.read_text().replace("\\-", "-")
    for path, command in commands_of(ingle):
        section = re.search(rf"^\.SS {path}(?: |$)(.*?)(?=^\.S[SH] )", text, re.MULTILINE | re.DOTALL)
        assert section, path
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert all(option in section[1] for option in parameter.opts), (path, parameter.opts)


def test_man_page_has_the_tables_of_the_documents(man_page: Path) -> None:
    text = man_page.read_text()
    assert '.TH INGLE 1 "2026-01-31" "Inglenook 7.8.9"' in text
    assert "\n.TP\n130\ninterrupted\n" in text
    assert "\\fB~/.config/inglenook/config.toml\\fR" in text


def test_man_page_is_valid_roff(man_page: Path) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", man_page.read_text())
    validate("mandoc", "-Tlint", "-W", "warning", str(man_page))
    validate("groff", "-man", "-Tutf8", "-k", "-z", "-ww", str(man_page))
