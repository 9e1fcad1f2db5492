"""The disk tier: computed blocks in files that outlive the process."""
