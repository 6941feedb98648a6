"""Pure decisions of the read path: no I/O, no clock, no randomness of its own."""
