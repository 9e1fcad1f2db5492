"""The engine on a GPU: kernels launched one after another, or replayed as a graph. The counterpart of `engine.cpu`."""
