"""`backend: slurm`: the batch script, and the commands of Slurm that submit, show and stop it. It may import modules of `launch`."""
