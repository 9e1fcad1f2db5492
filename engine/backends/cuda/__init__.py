"""The GPU engine. A step launches its kernels one by one, or replays a captured CUDA graph."""
