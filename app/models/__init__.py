"""Models as files: catalog, downloads, storage, and loading."""
