"""Several processes that answer on one port: a parent that starts and joins them, and its workers.

processes  the parent: binds the port, starts workers, starts again who ends, stops them
hub        the parent: passes load on between workers and other balancers, adds up figures
pipe       between the two: frames over a socket that the worker inherits
seat       the worker: what its balancer is given instead of what a single process has
child      the worker's entry
"""
