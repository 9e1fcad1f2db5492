"""The composition root: command line, settings, chat service, model store and downloads."""
