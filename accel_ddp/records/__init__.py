"""The formats of the files that a run writes for people and programs: log.jsonl, incidents.jsonl, tables of
evaluations.

Writers and readers share these modules. They import only `errors`, and not torch.
"""
