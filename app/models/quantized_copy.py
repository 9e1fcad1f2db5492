"""Write a quantized copy of a checkpoint, calibrated with the text of calibration.txt.

Importing this module imports torch.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from app.errors import AppError, ModelNotFound, NoSpace
from app.models.repository import CONFIG, DESCRIPTIONS
from app.models.transfer.incoming import check_space
from app.progress import Progress
from app.text.folder_tokenizer import from_folder
from app.text.tokenizer import Tokenizer
from app.whole_file import write_whole
from engine.calibration import input_squares
from engine.loading import open_checkpoint
from quant.checkpoint_files import read_bytes, read_object
from quant.errors import InglenookError, ModelFileError
from quant.quantize import is_linear_weight
from quant.quantized_storage import SECTION, Method, Storage, storage
from quant.safetensors_shards import SafetensorsShards
from quant.safetensors_values import PLAIN_TYPES, TYPE_NAMES, as_bytes, decode_plain
from quant.safetensors_writer import HEADER_BYTES, SHARD_BYTES, Entry, SafetensorsWriter

TEXT_FILE = Path(__file__).with_name("calibration.txt")


def measure(folder: Path, progress: Progress) -> dict[str, Tensor]:
    """Return the result of `calibration.input_squares`.

    If the model cannot run, print the reason and return an empty dict.
    """
    try:
        with open_checkpoint(folder) as checkpoint:
            ids = text_ids(from_folder(folder))
            with progress.task("Measuring activations for the calibration", len(ids), unit="tokens") as report:
                return input_squares(checkpoint, ids, report)
    except InglenookError as problem:
        progress.say(f"The copy is not calibrated and therefore less exact: {problem.message}.")
        return {}


def text_ids(tokenizer: Tokenizer) -> Sequence[int]:
    """Return the token ids of the text, as the start of a document."""
    ids = tokenizer.encode(TEXT_FILE.read_text(encoding="utf-8"))
    return [tokenizer.bos_id, *ids] if tokenizer.add_bos and tokenizer.bos_id is not None else ids


# Files that other programs may need, most of them for the tokenizer.
COMPANIONS = ("tokenizer.model", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "LICENSE")
# returns the importance of the columns, shape [columns], by weight name in the files
Measure = Callable[[], Mapping[str, Tensor]]
ORIGINAL = "Give the folder of the original model, with weights of 16 or 32 bits."


@dataclass(frozen=True)
class QuantizedCopy:
    """The result of writing a copy."""

    path: Path
    method: str
    group_size: int | None  # columns that share a scale; None: a whole row
    layers: int  # linear layers that were quantized
    original_bytes: int  # bytes of all tensors
    size: int  # bytes of all files


def save_quantized(
    source: Path,
    target: Path,
    method: Method,
    progress: Progress,
    shard_bytes: int = SHARD_BYTES,
    measure: Measure = dict,
) -> QuantizedCopy:
    """Quantize the checkpoint in the folder `source` into the new folder `target`.

    `measure` is called once it is certain that there is something to write; see `quant.quantize.int4`.

    Raises ModelNotFound if there is no checkpoint, AppError if it is already quantized or the target exists,
    ModelFileError if it cannot be read or quantized with this method, or NoSpace. Only one process at a time may write
    the same target.
    """
    if os.path.lexists(target):
        raise AppError(f"{target} already exists", "Choose another folder for the copy, or remove this one.")
    if not source.is_dir():
        raise ModelNotFound(f"{source} is not a folder", f"Pass a folder with {CONFIG} and safetensors files.")
    with SafetensorsShards(source) as checkpoint:
        config = _read_config(source)
        layers = _layers(checkpoint)
        chosen = storage(method, [checkpoint.tensors[name].shape[1] for name in layers])
        _check_space(target, checkpoint, layers, chosen)
        importance = measure()
        with _new_folder(target) as folder:
            writer = SafetensorsWriter(folder, shard_bytes)
            _write_tensors(checkpoint, {name: importance.get(name) for name in layers}, chosen, writer, progress)
            section = chosen.section(_kept(checkpoint, layers))
            write_whole(folder / CONFIG, json.dumps(config | {SECTION: section}, indent=2).encode())
            _copy_companions(source, folder)
        return QuantizedCopy(
            path=target,
            method=method.name,
            group_size=chosen.group,
            layers=len(layers),
            original_bytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
            size=sum(path.stat().st_size for path in target.rglob("*") if path.is_file()),
        )


def _read_config(source: Path) -> dict[str, object]:
    """Return the content of config.json, for a model that is not quantized yet."""
    config = read_object(source, CONFIG)
    if config is None:
        raise ModelNotFound(f"{source} has no {CONFIG}", "Give the folder of a checkpoint, with all its files.")
    if config.get(SECTION) is not None:
        raise AppError(f"{source} is already quantized: its {CONFIG} has {SECTION}", ORIGINAL)
    return config


def _layers(checkpoint: SafetensorsShards) -> frozenset[str]:
    """Return the names of the weights to quantize."""
    names = frozenset(name for name, tensor in checkpoint.tensors.items() if is_linear_weight(name, tensor.shape))
    for name in sorted(names):
        if (kind := checkpoint.tensors[name].type.name) not in PLAIN_TYPES:
            raise AppError(f"{checkpoint.path} is already quantized: {name} is of type {kind}", ORIGINAL)
    if not names:
        raise AppError(f"{checkpoint.path} has no linear layers to quantize", ORIGINAL)
    return names


def _kept(checkpoint: SafetensorsShards, layers: frozenset[str]) -> list[str]:
    """Return the modules whose matrices are not quantized. The head is included even if the files do not have it."""
    matrices = {name for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    return sorted({"lm_head"} | {name.removesuffix(".weight") for name in matrices - layers})


def _check_space(target: Path, checkpoint: SafetensorsShards, layers: frozenset[str], chosen: Storage) -> None:
    def stored(name: str) -> float:
        tensor = checkpoint.tensors[name]
        return tensor.nbytes * chosen.bits / tensor.type.bits if name in layers else tensor.nbytes

    try:
        check_space(target.parent, int(sum(map(stored, checkpoint.tensors))) + HEADER_BYTES)
    except NoSpace as problem:
        raise NoSpace(problem.message, "Free some space, or choose a folder on another disk for the copy.") from None


def _write_tensors(
    checkpoint: SafetensorsShards,
    layers: Mapping[str, Tensor | None],
    chosen: Storage,
    writer: SafetensorsWriter,
    progress: Progress,
) -> None:
    done, total = 0, sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    with writer, progress.task(f"Quantizing {checkpoint.path.name}", total) as report:
        for name, tensor in checkpoint.tensors.items():
            plain = [_plain(checkpoint, name)]
            for entry in _quantized(checkpoint, name, chosen, layers[name]) if name in layers else plain:
                writer.add(entry)
            done += tensor.nbytes
            report(done)


def _plain(checkpoint: SafetensorsShards, name: str) -> Entry:
    tensor = checkpoint.tensors[name]
    return Entry(name, tensor.type.name, tensor.shape, checkpoint.data(name))


def _quantized(checkpoint: SafetensorsShards, name: str, chosen: Storage, importance: Tensor | None) -> Iterator[Entry]:
    layer = name.removesuffix("weight")
    try:
        parts = chosen.encode(decode_plain(checkpoint.tensors[name], checkpoint.data(name)), importance)
    except ModelFileError as problem:
        raise ModelFileError(f"{checkpoint.path}: {name}: {problem.message}", problem.remedy) from None
    for part, values in parts.items():
        yield Entry(layer + part, TYPE_NAMES[values.dtype], tuple(values.shape), as_bytes(values))


def _copy_companions(source: Path, folder: Path) -> None:
    for name in {*DESCRIPTIONS, *COMPANIONS} - {CONFIG}:
        content = read_bytes(source, name)
        if content is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            write_whole(folder / name, content)


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write in, which becomes `target` if the body succeeds. Removes the files that a killed
    process left there.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
