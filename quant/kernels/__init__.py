"""GPU kernels over canonical weights, beside the plain reference that defines and tests them."""
