"""GPU kernels for canonical weights, and the plain reference implementation that they are tested against."""
