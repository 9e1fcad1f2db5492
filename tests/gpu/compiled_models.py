"""Compile all kernels of a model for a card that is not there."""

from dataclasses import dataclass, replace

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.backends.cuda.kernel_compilation import compile_kernels, recording_kernels
from engine.model_config import ModelConfig
from quant.kernels.card import Card
from tests.kernels.recorded_steps import RecordedModel


@dataclass(frozen=True)
class AbsentDriver:
    """Triton's driver of a card, as far as compiling takes it."""

    architecture: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_model(card: Card, model: ModelConfig, mix: str, context: int, requests: int) -> int:
    """Compile the kernels of a model of two layers into Triton's cache. Returns their number.

    More layers have the same kernels.
    """
    driver.set_active(AbsentDriver(card.architecture))
    recorded = RecordedModel(card, replace(model, layers=model.layers[:2]), mix)
    with recording_kernels() as variants:
        recorded.launch_every_kernel(context, requests)
    compile_kernels(variants, lambda done, total: None)
    missing = [variant.name for variant in variants if not variant.is_cached()]
    if missing:
        raise RuntimeError(f"kernels did not compile: {', '.join(missing)}")
    return len(variants)
