"""A question whose reply never ends, for tests that act while the reply runs."""

# At temperature 0 the default model soon repeats itself, and continues to the end of any context.
WITHOUT_END = ("List all prime numbers.", "--temperature", "0")
