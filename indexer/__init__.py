"""The write path: engines' KV-cache events become an index of who holds which blocks.

`sources` finds each rank's event stream, `subscriber` moves ZMQ frames, `core.stream` puts
batches in order, `core.events` decodes them, `core.rank_blocks` turns them into index changes,
an index backend (`memory_index`) applies them, `service` runs it all, `status` shows it.
"""
