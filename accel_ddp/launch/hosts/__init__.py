"""The launching machine's side of `backend: ssh` and `backend: local`: connections to the nodes, checks, output, and the end of a job.

It may import `launch.node` and the modules of `launch`.
"""
