"""The process group and what ranks exchange.

The package opens the process group, lets ranks agree on values and wait for each other, connects each rank to the monitor of its
node, turns signals into a stop that all ranks agree on, and turns the end of a rank into an exit code. The state of a rank is in
`process`. The package may import what is below it (`errors`, `nodes`, `config`, `records`, `phases`, `watch`) and torch.
"""
