"""What exit codes and the codes of the doctor mean, for docs/codes.md. The fixes are in accel_ddp/doctor/fixes.yaml."""

from accel_ddp.errors import INTERRUPTED, STOPPED, UNSAVED, USER_ERROR

EXIT_CODES = {
    0: "The run is complete.",
    1: "A rank failed with an exception, or died. The message names the rank and its host.",
    USER_ERROR: "An option, a file or the cluster is wrong. The message states what to run instead.",
    UNSAVED: "The run is complete or was stopped, but its last checkpoint could not be written.",
    STOPPED: "The run was stopped on request, perhaps before its first step. The message states which step was saved. Continue with "
    "`--resume`.",
    INTERRUPTED: "A second Ctrl-C, or a Ctrl-C before training began, interrupted the run. Nothing was saved.",
}
# In the groups of the page.
MEANINGS = {
    "This node: its numbers and addresses": {
        "E_PROCESSES": "num_processes is not a multiple of num_machines, or accelerate started another number of processes.",
        "E_TRAINS_ALONE": "This node would train alone, because of --cpu, distributed_type MULTI_CPU or NO, or num_machines 1.",
        "E_MACHINE_RANK": "machine_rank is not smaller than num_machines.",
        "E_MAIN_ELSEWHERE": "This node is machine_rank 0, but does not have the main address.",
        "E_MAIN_PUBLIC": "The main address is a public one, which node 0 itself does not have.",
        "E_MAIN_IS_HERE": "This node has the main address, but not machine_rank 0.",
        "E_NAME": "The name of the main node does not resolve here.",
        "E_IFNAME": "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that is not up.",
        "W_HOST_NAME": "The host name resolves to loopback or not at all, so gloo would announce a wrong address.",
        "I_HOST_NAME": "As W_HOST_NAME; the preflight has set the variables for this run.",
        "E_PORT": "This node cannot listen on a port.",
    },
    "This node: its limits, disks and GPUs": {
        "W_OPEN_FILES": "The hard limit of open files is too low for data workers.",
        "W_MEMLOCK": "This host has InfiniBand, but the limit of locked memory is too low for NCCL.",
        "W_SHM": "/dev/shm is almost full. Data workers and NCCL are killed with `Bus error` when it is full.",
        "W_DISK": "The disk of the output folder is almost full.",
        "E_DISK": "The output folder has too little space for the checkpoints.",
        "E_DISK_STUCK": "A disk or a program of this node does not answer.",
        "E_OUTPUT_DIR": "The output folder of the main node cannot be written.",
        "E_OUT": "`accel-ddp tune` cannot write to its output folder.",
        "E_GPU_COUNT": "This node has fewer visible GPUs than ranks.",
        "E_CUDA_VISIBLE_DEVICES": "CUDA_VISIBLE_DEVICES names a GPU that does not exist.",
        "E_GPU_ECC": "A GPU has uncorrectable memory errors.",
        "E_GPU_DRIVER": "The driver hangs, or the installed torch cannot use GPUs with it.",
        "W_GPU_DRIVER": "The GPUs of this node could not be checked.",
        "W_GPU_BUSY": "Another process uses a GPU.",
    },
    "The way to the main node": {
        "E_REFUSED": "The main address is up, but nothing listens on the port.",
        "E_DROPPED": "Nothing answers: packets are dropped, or no such host is up.",
        "E_UNREACHABLE": "The network cannot reach the main address.",
        "E_PORT_BUSY": "Another program, or the doctor of another run, has the main port.",
        "E_PORT_BLOCKED": "A firewall blocks the main port, but not another port of node 0.",
        "I_RENDEZVOUS": "A rendezvous is running at the main port. This node joins it if it belongs to this job.",
        "E_MAIN_LOST": "The connection to the main node was lost before the verdict.",
    },
    "All nodes together": {
        "E_MISSING": "A node or rank did not connect in time.",
        "E_LATE": "A node connected after the others had been checked.",
        "E_SILENT": "A node did not answer in time, or closed its connection.",
        "E_DUPLICATE": "Several nodes have the same machine_rank, or processes the same RANK.",
        "E_COUNTS": "The number of nodes differs between the nodes, or the numbers of ranks contradict the total.",
        "E_VERSIONS": "Package versions differ between the nodes.",
        "W_PYTHON": "Python versions differ between the nodes.",
        "E_CODE": "The code differs between the nodes.",
        "E_OPTIONS": "Options differ between the nodes, or a node exited because of its options.",
        "E_ACCELERATE_CONFIG": "The accelerate configs differ between the nodes, for example FSDP on one and DDP on another, or a "
        "config is not supported.",
        "E_FILES": "A file differs between the nodes, or a node does not have it.",
        "I_FILES": "A file was not compared, because reading it takes too long.",
        "W_HUB": "The nodes have cached different commits of a model or dataset.",
        "W_ENVIRONMENT": "NCCL settings differ between the nodes.",
        "W_DRIVER": "Driver versions differ between the nodes.",
        "E_GPU_MIX": "Some nodes have GPUs and some have none.",
        "W_GPU_KINDS": "The nodes have different GPUs. The slowest determines the speed.",
        "W_CLOCK": "The clocks of the nodes differ.",
    },
    "Paths between the nodes": {
        "E_PATH_DROPPED": "Packets between two nodes are dropped.",
        "E_PATH_REFUSED": "A firewall rejects connections between two nodes.",
        "E_PATH_ONE_WAY": "A path between two nodes works in one direction only.",
        "E_PATH_UNREACHABLE": "There is no route between two nodes.",
        "E_PATH_MTU": "Large packets between two nodes are dropped.",
        "E_PATH_CUT": "A connection between two nodes is closed at once.",
        "W_PATH_SLOW": "A path is slower than a quarter of the median of all paths.",
    },
    "Collectives": {
        "E_COLLECTIVE_STUCK": "A collective does not finish.",
        "E_COLLECTIVE_FAILED": "A rank of the collective checks failed or died.",
        "E_COLLECTIVE_WRONG": "An all-reduce returned wrong sums, or DDP's weights, buffers or gradients differ from a single "
        "process.",
        "E_GPU_PLACEMENT": "A rank has no GPU, or not the one it should use.",
        "W_GPU_SHARED": "Two ranks share a GPU.",
        "W_SLOW_TRANSPORT": "NCCL uses sockets although the host has InfiniBand or EFA.",
    },
}
