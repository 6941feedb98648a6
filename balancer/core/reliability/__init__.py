"""Whom not to ask just now, and how often to try again."""
