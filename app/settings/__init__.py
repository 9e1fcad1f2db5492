"""Settings: their values, config.toml, and the keys that let clients in. Only `settings.py` reads the environment."""
