"""The chat without a screen, line by line."""
