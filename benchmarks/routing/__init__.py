"""Routing decisions in virtual time: the balancer's own router before the simulator's engine core.

`traces` reads workloads (the files are in `kvlb/bench/data`), `virtual_time` steps engines without sleeping, `fleet` puts both behind a
router, `replay` sends a workload through it. `python -m benchmarks.routing.pd` is the experiment
on prefill here or elsewhere.
"""
