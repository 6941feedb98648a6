"""What an engine will feed its model: the tokens, and how many of them may be credited."""
