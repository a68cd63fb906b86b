"""`accel-ddp report`: one HTML page about one or several runs.

`log_reader` and `run_reader` read a run folder into a `ReportedRun` (`run_data`), and `chart_data` reduces it to what charts draw.
`sections` and `cards` state what the page shows, page.jinja is its markup, and `page` writes it. `report_command` is the command.
The package may import `saving` and the layers below it, but not torch, so it starts at once.
"""
