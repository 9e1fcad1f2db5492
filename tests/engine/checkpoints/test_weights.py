"""Loading weights from a checkpoint: threads, errors, interrupts, and memory."""

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from engine import models
from engine.backends.reference import ReferenceOperations
from engine.checkpoints.weights import Weights
from engine.loading import open_checkpoint
from engine.models.decoder import Decoder, Layer
from engine.operations import GatedMLP
from quant.errors import ModelFileError
from tests.support.random_gguf import SIZES, write


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write(path, "Q8_0", SIZES["tiny"])
    return path


def loading_threads_end() -> bool:
    """Whether all loading threads end. A thread that is just starting cannot be joined yet."""
    for thread in threading.enumerate():
        while thread.name.startswith("loading") and thread in threading.enumerate():
            with contextlib.suppress(RuntimeError):
                thread.join(timeout=600)
    return not any(thread.name.startswith("loading") for thread in threading.enumerate())


def layers_of(path: Path, threads: int) -> tuple[Layer, ...]:
    with open_checkpoint(path) as checkpoint:
        config = models.read_config(checkpoint.metadata)
        weights = Weights(checkpoint.path, models.stored_weights(checkpoint), threads=threads)
        model = models.load(config, weights, ReferenceOperations(keep_dequantized=True), 512)
    assert isinstance(model, Decoder)
    return model._layers


def test_model_is_the_same_with_any_number_of_threads(tiny: Path) -> None:
    single, parallel = layers_of(tiny, threads=1), layers_of(tiny, threads=4)
    assert len(single) == len(parallel) == SIZES["tiny"].layers
    for one, other in zip(single, parallel, strict=True):
        assert one.mixer_norm is not None
        assert other.mixer_norm is not None
        assert torch.equal(one.mixer_norm.weight, other.mixer_norm.weight)
        assert isinstance(one.mlp, GatedMLP)
        assert isinstance(other.mlp, GatedMLP)
        layers = (
            (one.mixer_in.weight, one.mlp.gate_up, one.mlp.down),
            (other.mixer_in.weight, other.mlp.gate_up, other.mlp.down),
        )
        for ours, theirs in zip(*layers, strict=True):
            assert torch.equal(ours.dequantize(), theirs.dequantize())


def test_load_parallel_uses_all_threads(tiny: Path) -> None:
    """Each item waits for two others, which only works if three run at the same time."""
    meeting = threading.Barrier(3)

    def load(item: int) -> int:
        meeting.wait(timeout=600)
        return item * 10

    with open_checkpoint(tiny) as checkpoint:
        assert Weights(checkpoint.path, models.stored_weights(checkpoint), threads=3).load_parallel(load, range(6)) == [
            0,
            10,
            20,
            30,
            40,
            50,
        ]
    assert loading_threads_end()


def test_first_failing_item_raises_and_others_stop(tiny: Path) -> None:
    """Item 1 fails first, but the raised error is that of item 0."""
    failed, taken = threading.Event(), []

    with open_checkpoint(tiny) as checkpoint:
        weights = Weights(checkpoint.path, models.stored_weights(checkpoint), threads=2)

        def load(item: int) -> None:
            if item == 1:
                failed.set()
                raise ValueError("the second")
            failed.wait(timeout=600)
            taken.append(item)
            weights.take(f"blk.{item}.no_such_tensor", 1)

        with pytest.raises(ModelFileError, match=r"blk\.0\.no_such_tensor"):
            weights.load_parallel(load, range(50))
    assert len(taken) < 50
    assert loading_threads_end()


def test_interrupt_stops_after_the_current_tensors(tiny: Path) -> None:
    """The signal arrives while a thread reports its layer's first tensor. No thread starts another tensor."""
    done: list[int] = []

    def report(bytes_done: int, total: int) -> None:
        done.append(bytes_done)
        if len(done) == 3:  # after the embedding and the head
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.wait(timeout=600)

    class Watched(Weights):
        """Sets `interrupted` when the main thread has handled the signal."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_cancelled" and value:
                interrupted.set()

    interrupted = threading.Event()
    with open_checkpoint(tiny) as checkpoint:
        config = models.read_config(checkpoint.metadata)
        weights = Watched(checkpoint.path, models.stored_weights(checkpoint), report, threads=2)
        with pytest.raises(KeyboardInterrupt):
            models.load(config, weights, ReferenceOperations(keep_dequantized=False), 512)
        assert 3 <= len(done) <= 4
    assert loading_threads_end()
