"""A checkpoint folder gives the same answer in Inglenook and in transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from app.models.load.loaded_model import load_model
from app.models.store import ModelStore
from app.progress import SilentProgress
from quant.errors import ModelFileError
from quant.safetensors_shards import INDEX
from tests.app.models.tiny_chat import save
from tests.app.models.tiny_model import settings_in

ROOT = Path(__file__).parents[3]
QUESTION, TOKENS = "what does the lazy fox say?", 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of several shards. Its recommended sampling is almost greedy, unlike the default."""
    path = tmp_path_factory.mktemp("tiny-chat")
    save(path, shard_size="40KB", do_sample=True, temperature=0.0001)
    assert (path / INDEX).exists()
    return path


def their_answer(folder: Path) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], return_tensors="pt")
    reply = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False, pad_token_id=1)[0]
    return str(tokenizer.decode(reply[prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def test_folder_gives_the_same_answer_as_transformers(folder: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "INGLE_STATE_DIR": str(tmp_path / "state"),
        "INGLE_MODELS_DIR": str(tmp_path / "models"),
        "INGLE_OFFLINE": "1",
    }
    options = ["--model", str(folder), "--kernels", "reference", "-n", str(TOKENS), "--json", "-q"]
    command = [sys.executable, "-m", "app", "run", QUESTION, *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    answer = json.loads(done.stdout)
    assert answer["text"]
    # our reply ends before an incomplete character
    assert their_answer(folder) in (answer["text"], f"{answer['text']}\ufffd")
    assert answer["usage"]["completion_tokens"] == TOKENS


def test_fingerprint_covers_all_files_of_a_folder(folder: Path, tmp_path: Path) -> None:
    settings = settings_in(tmp_path, kernels="reference", kv_disk_dir=tmp_path / "kv", kv_disk_gb="0.5", context=64)
    load_model(ModelStore(settings).resolve(str(folder)), settings, SilentProgress())
    [kept] = (tmp_path / "kv").iterdir()
    assert json.loads((kept / "about.json").read_text())["model"] == folder.name
    digests = tmp_path / "models" / ".digests"
    names = {Path(json.loads(record.read_bytes())["path"]).name for record in digests.iterdir()}
    assert names == {"config.json", *(path.name for path in folder.glob("*.safetensors"))}


def test_tokens_beyond_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    save(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["added_tokens"].append({**document["added_tokens"][0], "id": 300, "content": "<image>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 299, 300]}')
    settings = settings_in(tmp_path, kernels="reference", kv_disk_gb="0", context=64)
    loaded = load_model(ModelStore(settings).resolve(str(tmp_path)), settings, SilentProgress())
    assert loaded.tokenizer.vocab_size == loaded.engine.vocab_size == 300
    assert loaded.tokenizer.end_of_generation_ids == {1, 299}


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json"])
def test_error_names_a_damaged_file(tmp_path: Path, name: str) -> None:
    save(tmp_path)
    (tmp_path / name).write_bytes(b"{")
    settings = settings_in(tmp_path, kernels="reference", kv_disk_gb="0", context=64)
    with pytest.raises(ModelFileError, match=name):
        load_model(ModelStore(settings).resolve(str(tmp_path)), settings, SilentProgress())
