"""GPU kernels for canonical weights, and the reference implementation in plain torch that they are tested against."""
