"""`accel-ddp report`: one HTML page, and CSV files, from the folders of one or several runs.

`runs` reads a folder into a `Run`, `compare` and `downsample` prepare runs for the page, `page` writes the page, and `command` is
the command. The package imports `errors`, `records` and `saving.format`, and not torch, so that it starts at once.
"""
