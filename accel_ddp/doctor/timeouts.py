"""Time limits that several modules of the doctor share, in seconds."""

FIRST_NOTICE = 2.0  # until the first line about what the doctor waits for
NOTICE_INTERVAL = 10.0  # between further lines
FACTS = 45.0  # for a connected node to send its facts; its disks and its driver may be slow
MAIN_SILENT = 20.0  # without a message from the coordinator, which sends one every 2 s
NO_ANSWER = 8.0  # without any answer from an address; a host that is up answers at least with a refusal
PREFLIGHT_NO_ANSWER = 60.0  # the same in a preflight, where the main node may still be booting
