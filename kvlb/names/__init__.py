"""Host names: engines found by DNS, and engines whose name has come to stand for another address."""
