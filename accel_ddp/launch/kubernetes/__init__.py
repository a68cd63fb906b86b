"""`backend: kubernetes`: the manifests, and the calls of kubectl. It may import modules of `launch`."""
