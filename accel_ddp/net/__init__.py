"""Messages between processes on different nodes: `messages` frames and authenticates them, `sanitize` validates their content,
`probe` measures the path between two nodes.

This package imports only the standard library, so that tools which must start within milliseconds can use it.
"""
