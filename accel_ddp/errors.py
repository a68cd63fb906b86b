"""The error type for users' mistakes, and the exit codes of a rank."""

# 74 and 75 are EX_IOERR and EX_TEMPFAIL of sysexits.h.
USER_ERROR, UNSAVED, STOPPED, INTERRUPTED = 2, 74, 75, 130
EXIT_CODES = {
    0: "The run is complete.",
    1: "A rank failed with an exception, or died. The message names the rank and its host.",
    USER_ERROR: "An option, a file or the cluster is wrong. The message states what to run instead.",
    UNSAVED: "The run is complete or was stopped, but its last checkpoint could not be written.",
    STOPPED: "The run was stopped on request, perhaps before its first step. The message states which step was saved. Continue with "
    "`--resume`.",
    INTERRUPTED: "A second Ctrl-C, or a Ctrl-C before training began, interrupted the run. Nothing was saved.",
}


class UserError(Exception):
    """A mistake that the user can correct. It is printed without a traceback, and the exit code is 2."""
