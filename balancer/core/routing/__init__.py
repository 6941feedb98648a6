"""From candidates to a plan with its reason, and what the index had promised of it."""
