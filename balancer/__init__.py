"""The read path: an OpenAI request goes to the rank where the least work is left to do.

`exchange` is one client connection, `dataplane` understands its request, `router` asks the index
and plans, `legs` carries the plan out over `upstream`, `connectors` shape the legs of a PD
request, `app` puts the FastAPI administration behind it. All deciding is in `core`.
"""
