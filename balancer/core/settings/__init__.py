"""What an operator can set, by part; a wrong key or value is refused by its name."""
