"""The APIs of LM Studio, for editors and programs that look for it."""
