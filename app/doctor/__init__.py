"""The checks of `ingle doctor`."""
