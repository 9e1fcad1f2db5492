"""From a conversation to a reply: messages, chat templates, prompts, grammars, and the events of replies."""
