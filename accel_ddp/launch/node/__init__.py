"""What runs on each node with `backend: ssh` and `local`: the guard, and the files of a job. It may import modules of `launch`."""
