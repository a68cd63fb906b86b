"""`accel-ddp report`: one HTML page about one or several runs.

`log_reader` and `run_reader` read a run folder into a `ReportedRun` (`run_data`), and `chart_data` reduces it to what charts draw.
`markup` and `cards` make HTML, `charts` and `sections` are the sections of the page, and `page` writes it. `report_command` is the
command. The package may import `saving` and the layers below it, but not torch, so it starts at once.
"""
