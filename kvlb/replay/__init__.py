"""`kvlb replay`: sends a trace to an OpenAI endpoint at the trace's own pace, and reports.

`core` reads rows, writes prompts, plans the schedule, reads answers and counts, without I/O; `trace_file`
opens traces, `sending` is the open loop, `progress`, `show` and `plot` are what people see.
"""
