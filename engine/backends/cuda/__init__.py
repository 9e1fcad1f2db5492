"""The engine on a GPU: a step launches its kernels one by one, or replays a recorded graph."""
