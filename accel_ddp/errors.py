"""The error type for users' mistakes, and the exit codes of a rank (docs/codes.md)."""

# 74 and 75 are EX_IOERR and EX_TEMPFAIL of sysexits.h.
USER_ERROR, UNSAVED, STOPPED, INTERRUPTED = 2, 74, 75, 130


class UserError(Exception):
    """A mistake that the user can correct. It is printed without a traceback, and the exit code is 2."""
