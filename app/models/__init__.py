"""Models as files: the catalog, where they come from, where they are kept, and how one becomes ready to talk."""
