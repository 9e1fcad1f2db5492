"""Reply generation: messages, chat templates, prompts, grammars, and the events of replies."""
