import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import transformers

import quant.safetensors_shards
from quant.errors import ModelFileError, SafetensorsError
from quant.safetensors import SafetensorsFile
from quant.safetensors_shards import INDEX, SINGLE_FILE, SafetensorsShards
from quant.safetensors_values import decode_plain
from tests.quant.opened_files import open_descriptors, opened_files
from tests.quant.safetensors_bytes import build, small_file, write_index, write_shards

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {ONE: {"a": ("U8", [3], b"abc"), "b": ("F32", [], bytes(4))}, TWO: {"c": ("I8", [1, 2], b"yz")}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two shards."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    write_shards(path, SHARDS)
    return path


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """The checkpoint of `folder`, in the layout of the Hugging Face cache."""
    repository = tmp_path / "hub" / "models--org--name"
    path = repository / "snapshots" / "0123abcd"
    path.mkdir(parents=True)
    (repository / "blobs").mkdir()
    write_shards(path, SHARDS)
    for file in list(path.iterdir()):
        blob = repository / "blobs" / sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, path))
    return path


def rejection(path: Path) -> SafetensorsError:
    with pytest.raises(SafetensorsError) as caught:
        SafetensorsShards(path)
    assert caught.value.remedy
    assert str(caught.value).isprintable()
    return caught.value


def contents(path: Path) -> dict[str, bytes]:
    with SafetensorsShards(path) as checkpoint:
        return {name: bytes(checkpoint.data(name)) for name in checkpoint.tensors}


def test_shards_are_one_set_of_tensors(folder: Path) -> None:
    assert contents(folder) == {"a": b"abc", "b": bytes(4), "c": b"yz"}
    with SafetensorsShards(folder) as checkpoint:
        assert checkpoint.tensors["c"].shape == (1, 2)
        assert checkpoint.tensors["c"].type.name == "I8"
        data = checkpoint.data("c")
        with pytest.raises(KeyError):
            checkpoint.data("d")
    assert bytes(data) == b"yz"


def test_checkpoints_written_by_transformers_are_read(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type]
    for size, shards in (("1GB", 1), ("40KB", 2)):
        path = tmp_path / size
        model.save_pretrained(path, max_shard_size=size)
        assert len(list(path.glob("*.safetensors"))) >= shards
        with SafetensorsShards(path) as checkpoint:
            state = model.state_dict()
            assert checkpoint.tensors.keys() == state.keys()
            for name, tensor in checkpoint.tensors.items():
                assert torch.equal(decode_plain(tensor, checkpoint.data(name)).values, state[name])


def test_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    """The file is named directly, through a link, or found in its folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(small_file())
    link = tmp_path / "link.safetensors"
    link.symlink_to(elsewhere)
    (tmp_path / SINGLE_FILE).write_bytes(small_file())
    with SafetensorsFile(elsewhere) as file:
        for path in (elsewhere, link, tmp_path):
            with SafetensorsShards(path) as checkpoint:
                assert checkpoint.tensors == file.tensors
                assert checkpoint.header_digest == file.header_digest


def test_digest_depends_on_every_header_and_name(folder: Path) -> None:
    def digest() -> str:
        with SafetensorsShards(folder) as checkpoint:
            return checkpoint.header_digest

    digests = [digest()]
    (folder / TWO).write_bytes(build({"c": ("U8", [1, 2], b"yz")}))
    digests.append(digest())
    (folder / TWO).rename(folder / "other.safetensors")
    write_index(folder, {"a": ONE, "b": ONE, "c": "other.safetensors"})
    digests.append(digest())
    assert len(set(digests)) == 3
    assert digest() == digests[-1]


def test_folder_without_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="has neither"):
        SafetensorsShards(tmp_path)
    with pytest.raises(ModelFileError, match="Cannot open"):
        SafetensorsShards(tmp_path / "missing")


def test_error_names_the_missing_shard(folder: Path) -> None:
    (folder / TWO).unlink()
    error = rejection(folder)
    assert TWO in error.problem
    assert "pull" in error.remedy


def test_index_and_shards_must_agree(folder: Path) -> None:
    write_index(folder, {"a": ONE, "b": ONE, "c": ONE})
    error = rejection(folder)
    assert (error.field, error.problem) == ("weight_map, c", f"{ONE} has no such tensor")
    write_index(folder, {"a": ONE, "c": TWO})
    error = rejection(folder)
    assert error.field == "weight_map, b"
    assert ONE in error.problem
    (folder / TWO).write_bytes(build({"c": ("U8", [0], b""), "a": ("U8", [3], b"abc")}))
    write_index(folder, {"a": ONE, "b": ONE, "c": TWO})
    error = rejection(folder)
    assert error.field == "weight_map, a"
    assert TWO in error.problem


def test_error_names_the_malformed_shard(folder: Path) -> None:
    (folder / TWO).write_bytes((folder / TWO).read_bytes()[:-1])
    assert rejection(folder).path == folder / TWO


@pytest.mark.parametrize(
    ("index", "field", "problem"),
    [
        ("", "index", "JSON"),
        ("[]", "index", "not an object"),
        ('{"weight_map":{"a":"x","a":"y"}}', "index", "twice"),
        ('{"a":' * 10_000, "index", "nested"),
        ("{}", "weight_map", "does not map"),
        ('{"weight_map":{}}', "weight_map", "does not map"),
        ('{"weight_map":[["a","b"]]}', "weight_map", "does not map"),
        ('{"weight_map":{"a":1}}', "weight_map, a", "not a string"),
        ('{"weight_map":{"\\u001b[2J":null}}', "weight_map, '\\x1b[2J'", "not a string"),
    ],
)
def test_hostile_index_is_rejected(folder: Path, index: str, field: str, problem: str) -> None:
    (folder / INDEX).write_text(index)
    error = rejection(folder)
    assert error.field == field
    assert problem in error.problem


def test_index_size_is_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(folder / INDEX, quant.safetensors_shards.MAX_INDEX_BYTES + 1)
    assert "over the limit" in rejection(folder).problem
    monkeypatch.setattr(quant.safetensors_shards, "MAX_SHARDS", 1)
    write_shards(folder, SHARDS)
    assert "more than 1 shards" in rejection(folder).problem


@pytest.fixture
def opens() -> Iterator[list[str]]:
    with opened_files() as paths:
        yield paths


PARTS = [
    "..",
    ".",
    "",
    "/",
    "\\",
    "//",
    "C:",
    "\\\\host\\share",
    "~",
    "%2e%2e",
    "etc",
    "secret",
    "\0",
    "\n",
    " ",
    "\u202e",
]
HOSTILE_NAMES = sorted(
    {
        *(f"{first}{separator}secret.safetensors" for first in PARTS for separator in "/\\"),
        *(f"{first}{separator}.." for first in PARTS for separator in "/\\"),
        *(f"{part}secret.safetensors" for part in PARTS if part not in {"", "..", ".", "etc", "secret"}),
        *(f"{name}.safetensors" for name in ("CON", "nul", "com1", "LPT9", "nul.x", "", ".", "..", "-x", "x" * 300)),
        *("secret", "secret.safetensors.", "secret.safetensors ", "secret.safetensors\0", "secret.safetensors:stream"),
        *("secret.safetensors\n", "secret.SAFETENSORS", "ſecret.safetensors", "", ".", "..", "/", INDEX, "x.bin"),
        *(f"{'../' * depth}secret.safetensors" for depth in range(1, 60)),
        *(f"{'..' + chr(92)}{'x/' * depth}secret.safetensors" for depth in range(60)),
    }
)  # fmt: skip


def test_hostile_shard_names_open_no_file(folder: Path, opens: list[str]) -> None:
    """A secret file that could be read exists in the parent folder."""
    (folder.parent / "secret.safetensors").write_bytes(build({"a": ("U8", [3], b"abc")}))
    assert len(HOSTILE_NAMES) >= 200
    for name in HOSTILE_NAMES:
        write_index(folder, {"a": name})
        opens.clear()
        error = rejection(folder)
        assert error.field == "weight_map, a"
        assert "not a valid name" in error.problem, name
        assert opens == [str(folder / INDEX)], name


def test_hugging_face_snapshot_is_read(snapshot: Path, tmp_path: Path) -> None:
    """The snapshot is also read through a link to its folder, and after its blobs folder was moved."""
    expected = {"a": b"abc", "b": bytes(4), "c": b"yz"}
    assert contents(snapshot) == expected
    (tmp_path / "by link").symlink_to(snapshot)
    assert contents(tmp_path / "by link") == expected
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "moved")
    blobs.symlink_to(tmp_path / "moved")
    assert contents(snapshot) == expected


@pytest.mark.parametrize("name", [ONE, TWO, INDEX, SINGLE_FILE])
def test_links_to_anything_except_blobs_are_rejected(snapshot: Path, name: str, opens: list[str]) -> None:
    """The target of such a link is not opened."""
    repository, hub = snapshot.parent.parent, snapshot.parent.parent.parent
    other = hub / "models--org--other" / "blobs"
    below = repository / "blobs" / "below"
    folders = [hub, repository, snapshot, snapshot.parent, other, below]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "file").write_bytes(build({"a": ("U8", [3], b"abc")}))
    (repository / "blobs" / "escape").symlink_to(hub / "file")
    link = snapshot / name
    for target in [
        *(folder / "file" for folder in folders),
        repository / "blobs" / "escape",
        repository / "blobs",
        link,
    ]:
        for spelled in (str(target), os.path.relpath(target, snapshot)):
            link.unlink(missing_ok=True)
            link.symlink_to(spelled)
            opens.clear()
            error = rejection(snapshot)
            assert (error.path, error.field) == (link, "link"), spelled
            assert str(link) not in opens


def test_links_in_a_plain_folder_are_rejected(folder: Path) -> None:
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir(exist_ok=True)
    (folder / ONE).rename(blobs / "one")
    (folder / ONE).symlink_to(blobs / "one")
    assert rejection(folder).field == "link"


def test_link_to_a_missing_blob_is_rejected(snapshot: Path) -> None:
    (snapshot / ONE).resolve().unlink()
    with pytest.raises(ModelFileError, match="Cannot open"):
        SafetensorsShards(snapshot)


def test_shard_must_be_a_regular_file(folder: Path) -> None:
    (folder / TWO).unlink()
    os.mkfifo(folder / TWO)
    with pytest.raises(ModelFileError, match="regular"):
        SafetensorsShards(folder)
    (folder / TWO).unlink()
    (folder / TWO).mkdir()
    with pytest.raises(ModelFileError, match="regular"):
        SafetensorsShards(folder)


def test_all_files_are_closed(folder: Path) -> None:
    """Files are closed after use, and after an error in the second shard."""
    contents(folder)
    write_index(folder, json.loads((folder / INDEX).read_text())["weight_map"] | {"d": TWO})
    rejection(folder)
    assert open_descriptors(folder) == []
