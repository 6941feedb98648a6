"""`kvlb config reference`: every key of the file, told by the typed settings themselves.

`docstrings` reads what stands under a field in the source, `kinds` says types and defaults for people,
`keys` walks the settings, `page` renders them into `configuration.md.j2`.
"""
