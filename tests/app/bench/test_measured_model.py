"""The number of bytes that a decoding step reads, from the header of a file."""

from dataclasses import replace
from pathlib import Path

from app.bench.measured_model import weight_bytes
from quant.gguf_parts import GGUFParts
from tests.engine.models.family import VOCABULARY
from tests.engine.models.family_checkpoints import make
from tests.support.random_gguf import SIZES, write


def test_experts_that_compute_no_token_are_not_counted(tmp_path: Path) -> None:
    shape = replace(SIZES["tiny"], experts=8, active=2)
    write(tmp_path / "experts.gguf", "Q8_0", shape)
    with GGUFParts(tmp_path / "experts.gguf") as file:
        sizes = {name: tensor.nbytes for name, tensor in file.tensors.items()}
        experts = sum(size for name, size in sizes.items() if "_exps" in name)
        embedding = sizes["token_embd.weight"]
        rest = sum(sizes.values()) - experts - embedding + embedding // shape.vocabulary
        assert weight_bytes(file) == rest + experts // 4
        assert experts > rest


def test_table_of_the_embeddings_of_layers_is_read_a_row_at_a_time(tmp_path: Path) -> None:
    tiny = make(tmp_path, "gemma4 embeddings per layer", "gguf")
    with GGUFParts(tiny.path) as file:
        table = file.tensors["per_layer_token_embd.weight"]
        whole = sum(tensor.nbytes for tensor in file.tensors.values())
        assert weight_bytes(file) == whole - table.nbytes + table.nbytes // VOCABULARY
