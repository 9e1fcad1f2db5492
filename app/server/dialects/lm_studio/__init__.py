"""The APIs of LM Studio, for editors and other programs that look for it."""
