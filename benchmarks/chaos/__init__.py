"""Chaos: a fleet whose engines die, hang and lose the network while clients ask, judged by the simulator.

`schedule` draws what befalls whom, `requests` what is asked and what the answer is, `client` sends
one request, `stage` runs fleet and balancer, `judge` compares, `report` prints.
"""
