"""`accel-ddp doctor` and the preflight of every recipe: find out what is wrong with a cluster, on every node, within seconds.

The package contains checks of one host (`host_checks`, `gpus`, `facts`), the exchange between the nodes (`cluster`,
`coordinator`, `client`, `discovery`, `paths`, `compare`), small collectives with torch (`collectives`), and three ways to
start them (`command`, `preflight`, and `at_launch` inside the launchers, with `launcher_exit` and `restarts`). It may import
`errors`, `seeds`, `config`, `environment`, `net` and `watch`, the standard library, yaml and psutil; only the rank processes
of `collectives` import torch. This file has no code, because every process that imports torch's launcher loads it.
"""
