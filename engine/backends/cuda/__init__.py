"""The GPU engine: a step launches its kernels one by one, or replays a captured CUDA graph."""
