"""One module a widget. A widget posts what happened to it, and asks nobody but the port that it is given."""
