"""The mark by which a page of `accel-ddp report` is recognised, so that no other file is overwritten."""

GENERATOR = '<meta name="generator" content="accel-ddp report">'  # within the first 4096 bytes of the page
