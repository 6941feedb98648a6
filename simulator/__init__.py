"""vLLM engines without a GPU, written from the protocol notes and independent of kvlb's code."""
