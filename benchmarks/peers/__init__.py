"""Routing beside the routers of others, in real time: `python -m benchmarks.peers`.

The workloads of `kvlb bench routing`, sent over HTTP through each router in turn to four simulated
engines with limited caches, which publish their events over ZMQ. `engines` runs those, `routers` knows
how each router is started, `play` sends, `cells` puts one measurement together, `report` makes tables.

It is a module of the tree and no command of `kvlb`: it installs other people's programs beside it
and starts them, which nothing does that ships.
"""
