"""A contender behind HTTP: any server of OpenAI's completions, asked by the same client."""

import asyncio

from app.bench.completion_client import Endpoint, stream_all
from app.bench.sample import Sample, sample_of
from app.bench.workload import Load, Prompts
from app.process.uninterruptible import run_apart


class ServedContender:
    """A server that runs, and that nobody else uses."""

    def __init__(self, name: str, build: str, pid: int, endpoint: Endpoint) -> None:
        self.name = name
        self.build = build
        self.pid = pid
        self.endpoint = endpoint

    def warm_up(self, load: Load, prompts: Prompts) -> None:
        self.measure(load, prompts)

    def measure(self, load: Load, prompts: Prompts) -> Sample:
        timelines = run_apart(lambda: asyncio.run(stream_all(self.endpoint, prompts, load.output_tokens)))
        return sample_of(load, timelines)
