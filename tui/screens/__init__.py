"""The screens, one in each module, with its style sheet."""
