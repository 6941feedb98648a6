"""`kvlb demo`: the same conversations routed by kvlb and by round robin, side by side.

`client` sends the workload through the `openai` package, `counters` reads what the engines
counted, `run` starts a fresh simulated fleet per policy, `report` compares and judges.
"""
