"""`kvlb audit` compares what we would have predicted with what a recorded engine reported.

`capture` reads the two files, `publishers` says whose events they are, `streams` puts the batches of
each rank in order, `sent` says what each request asked, `forecast` replays the events through the decoder
and the index of the product, `rules` names the known causes of a difference, `report` counts.
"""
