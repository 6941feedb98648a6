"""The engine itself: blocks, scheduling, transfers, text. No I/O; time comes in as an argument."""
