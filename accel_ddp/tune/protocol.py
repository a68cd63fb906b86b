"""Constants and messages that the coordinator on the main node and the agents on all nodes share.

Every message is a JSON object. From the coordinator to an agent, by the value of "command":

    heartbeat
    print    text
    start    trial, port, environment, spec    start the worker processes of a trial
    kill                                       kill the worker processes of this node
    write    files                             write the files with the best values
    exit     code, text                        print the text and exit with this code

From an agent to the coordinator, by the value of "event":

    heartbeat
    worker_report    trial, rank, report         a worker printed this report, see `worker`
    worker_exit      trial, rank, code, output   a worker ended; output is its last error message
    node_done        trial                       all workers of this node have ended
    written          lines, is_complete          the answer to `write`
    leaving          reason                      the user ended this agent

The first message of an agent has no "event": it describes its node. The coordinator itself adds two events, `joined` and `lost`.
"""

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0  # after this time without a message the other side counts as lost
JOIN_SECONDS = 30.0  # for all agents to connect after the preflight
