"""The files that a run writes for people and programs: log.jsonl, incidents.jsonl, tables of evaluations, and without secrets.

Writers and readers share these modules. `files` has the one atomic file writer and the one background writer of the whole package.
The package may import the layers below it (`config` and what is below), and not torch.
"""
