"""Pure decisions of the write path: no I/O, no clock, no logging."""
