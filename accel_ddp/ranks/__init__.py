"""The process group and what ranks tell each other.

The package opens the process group, lets ranks agree on values and wait for each other, detects ranks that failed or died, turns
signals into a stop that all ranks agree on, and turns the end of a rank into an exit code. It imports only the lowest layer
(`errors`, `seeds`, `environment`, `net`, `config`) and torch.
"""
