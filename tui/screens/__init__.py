"""The screens, one per module, each with its style sheet."""
