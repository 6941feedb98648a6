"""Asks the index, plans, books, and tells the index afterwards what a leg has shown."""
