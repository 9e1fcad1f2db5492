"""The API of OpenAI, as far as engines that speak it have agreed on more."""
