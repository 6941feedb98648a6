"""`kvlb record`: writes what an engine publishes and answers, for `kvlb audit` and for tests.

The format is that of tests/captures/README.md.
"""
