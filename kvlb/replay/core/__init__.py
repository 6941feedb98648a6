"""Pure parts of `kvlb replay`: no I/O, no clock of their own."""
