"""`accel-ddp doctor` and the preflight of every recipe: find out what is wrong with a cluster, on every node, within seconds.

The package contains checks of one host (`host`, `facts`), the exchange between the nodes (`coordinator`, which `accel-ddp tune` uses
too, `verdict` on the main node, `node_client` on every node, `compare_nodes`), small collectives with torch (`collectives`), and three
ways to start the checks: `doctor_command`, `cluster.run_preflight` in a recipe, and `launcher_restarts` in launchers (`at_launch`). It
may import `errors`, `seeds`, `nodes`, `config` and `watch`, the standard library, yaml and psutil; only the rank processes of
`collectives` import torch. This file has no code, because every process that imports torch's launcher loads it.
"""
