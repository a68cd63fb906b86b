"""Where a process runs: topology, launchers, cores, sharding plan, and messages between nodes. Nothing here imports torch.

`topology` determines which node and rank this process is, of how many. `launcher` reads what `accelerate launch` or mpirun
was asked to start. `messages` frames, authenticates and validates what processes of different nodes send, and `probe` measures the
path between two nodes. `recipe_files` finds recipes and configs. The package may import `errors`, yaml and psutil.
"""
