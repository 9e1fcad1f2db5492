"""The chat without screens, line by line."""
