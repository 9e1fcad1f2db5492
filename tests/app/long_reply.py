"""A question whose reply cannot end before somebody has looked at it."""

# The default model, at temperature 0, soon says the same again and again, and goes on to the end of any context.
WITHOUT_END = ("List all prime numbers.", "--temperature", "0")
