"""What proxying costs, beside nginx, haproxy and two Rust routers in the same run.

`engine` are the instant engines behind every proxy, `client` the load, `process` reads what a
proxy's process tree used, `peers` and `proxies` start the proxies, `measure` takes one sample,
`report` turns samples into tables and verdicts. `python -m benchmarks.overhead` runs it all. `parts` is apart: what a
request costs kvlb itself, without sockets.
"""
