"""Valid repository names, and which files belong to a model."""

import pytest

from app.errors import ModelNotFound
from app.models.repository import ModelFiles, RepositoryName, choose, models_among, quantization_of

HOSTILE = (
    "org/..", "../x", "org/.git", "org/x.", "org/x ", "org/con", "org/NUL.txt", "com1/x", "aux/x", "org/a--b", "a--b/x",
    "org/a..b", "org\\x", "C:/x", "c:x/y", "//host/share", "org/x\0",
    "org/x\n", "org/x:..", "org/" + "x" * 300, "~/x", "org/x\u202e",
    "org/%2e%2e", "file:///etc/passwd",
)  # fmt: skip
CHECKPOINT = {"config.json", "tokenizer.json", "model.safetensors", "README.md", "evil.py", "pytorch_model.bin"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/repo", RepositoryName("org/repo")),
        ("org/repo:q4_k_m", RepositoryName("org/repo", "Q4_K_M")),
        ("hf:org/re.po-1", RepositoryName("org/re.po-1")),
        ("hf.co/org/repo:Q8_0", RepositoryName("org/repo", "Q8_0")),
        ("https://huggingface.co/org/repo", RepositoryName("org/repo")),
        (
            "https://huggingface.co/org/repo/resolve/main/a/m-Q5_K_M.gguf?download=true",
            RepositoryName("org/repo", "Q5_K_M"),
        ),
        ("https://huggingface.co/org/repo/blob/main/model.gguf", RepositoryName("org/repo")),
        *(
            (text, None)
            for text in (*HOSTILE, "repo", "a/b/c", "../b", "./b", "/a/b", "a/..", "a/b:", "a\\b/c", "-a/b", "a /b", "")
        ),
    ],
)
def test_valid_repository_names_are_parsed(text: str, name: RepositoryName | None) -> None:
    assert RepositoryName.parse(text) == name


@pytest.mark.parametrize(
    ("file", "quantization"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Model-8B-UD-Q4_K_XL.gguf", "Q4_K_XL"),
        ("m-iq4_nl.gguf", "IQ4_NL"),
        ("BF16/m-00001-of-00002.gguf", "BF16"),
        ("Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("m-mxfp4.gguf", "MXFP4"),
        ("q8bert/model.gguf", ""),
        ("model.gguf", ""),
    ],
)
def test_quantization_is_read_from_file_names(file: str, quantization: str) -> None:
    assert quantization_of(file) == quantization


def test_checkpoint_consists_of_descriptions_and_weights() -> None:
    assert choose(RepositoryName("o/r"), CHECKPOINT).files == ("config.json", "tokenizer.json", "model.safetensors")
    sharded = {"config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "x.safetensors"}
    assert choose(RepositoryName("o/r"), sharded).files == ("config.json", "model.safetensors.index.json")


def test_parts_of_a_gguf_model_form_one_model() -> None:
    names = {"m-Q4_0-00002-of-00002.gguf", "m-Q4_0-00001-of-00002.gguf", "m-Q8_0.gguf", "mmproj-m-F16.gguf"}
    first, second = models_among(names)
    assert first == ModelFiles("Q4_0", ("m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf"))
    assert second == ModelFiles("Q8_0", ("m-Q8_0.gguf",))
    assert first.is_whole
    assert not ModelFiles("Q4_0", first.files[1:]).is_whole
    assert choose(RepositoryName("o/r", "Q4_0"), names) == first


def test_checkpoint_is_preferred_without_a_quantization() -> None:
    names = CHECKPOINT | {"m-Q8_0.gguf"}
    assert not choose(RepositoryName("o/r"), names).is_gguf
    assert choose(RepositoryName("o/r", "Q8_0"), names).files == ("m-Q8_0.gguf",)
    assert choose(RepositoryName("o/r"), {"m-Q8_0.gguf", "config.json"}).is_gguf


@pytest.mark.parametrize(
    ("quantizations", "chosen"),
    [
        (("Q8_0", "Q4_0", "Q4_K_M", "Q2_K"), "Q4_K_M"),
        (("Q8_0", "Q4_0", "Q4_1"), "Q4_0"),
        (("Q8_0", "Q6_K"), "Q8_0"),
        (("Q6_K",), "Q6_K"),
    ],
)
def test_preferred_quantization_is_chosen(quantizations: tuple[str, ...], chosen: str) -> None:
    names = {f"m-{quantization}.gguf" for quantization in quantizations}
    assert choose(RepositoryName("o/r"), names).quantization == chosen
    with pytest.raises(ModelNotFound, match="is ambiguous"):
        choose(RepositoryName("o/r"), names | {f"other-{chosen}.gguf"})


@pytest.mark.parametrize(
    ("name", "names", "message", "remedy"),
    [
        (
            "o/r:Q4_0",
            CHECKPOINT | {"m-Q8_0.gguf"},
            "is not a model of this repository",
            "Choose one of: o/r, o/r:Q8_0.",
        ),
        ("o/r", {"m-Q5_0.gguf", "m-Q4_1.gguf"}, "is ambiguous", "Choose one of: o/r:Q4_1, o/r:Q5_0."),
        ("o/r", {"pytorch_model.bin", "config.json"}, "has no model that can run here", "GGUF"),
        ("o/r", {"model.safetensors"}, "has no model that can run here", "GGUF"),
    ],
)
def test_error_lists_the_available_quantizations(name: str, names: set[str], message: str, remedy: str) -> None:
    parsed = RepositoryName.parse(name)
    assert parsed is not None
    with pytest.raises(ModelNotFound, match=message) as caught:
        choose(parsed, names)
    assert remedy in caught.value.remedy
