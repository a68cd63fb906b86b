"""accel-ddp tune: which NCCL settings, bucket size and communication hook are fastest on this cluster, for this model.

command    options; first the doctor's preflight; how it ends
together   the parents of all nodes: one on the main node conducts, all attend; who dies is named
course     on the main node: which trial comes next, what is kept, what is told
ddp        its second part: bucket sizes and hooks
trials     one trial on all nodes, over in bounded time
search     which settings to try: no processes, no clocks
results    rows of the table, the files
ranks      on every node: the rank processes of a trial, ended in bounded time
rank       one rank of a trial: the only part, with `shapes`, that imports torch
shapes     the gradients of a model without its weights
"""
