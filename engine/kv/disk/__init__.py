"""The disk tier: computed blocks in files, which are kept after the process ends."""
