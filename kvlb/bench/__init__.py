"""`kvlb bench`: policies compared on fleets of simulated engines, in virtual time.

`traces` and `synthetic` make workloads (`calls`), `clock` and `engine` (with `blocks`) run engines
without sleeping, `fleet` puts them behind the balancer's own router, `play` sends a workload
through it, `figures` says what came of it. `saturation` knows what each fleet carries, `oracle` what
a clairvoyant would have made of it, `compare` whether differences are more than chance.
"""
