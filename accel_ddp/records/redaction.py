"""Removes secrets from what is written to logs, trackers and reports."""

import os
import re
from collections.abc import Mapping

HIDDEN = "***"
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)", re.IGNORECASE)
_SHORTEST = 6  # shorter values, such as "1" or "true", occur everywhere


def is_secret_name(name: str) -> bool:
    """Return whether a variable or an option of this name probably holds a secret."""
    return bool(_SECRET_NAME.search(name))


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return `text` without the values of secret environment variables and without user names and passwords in URLs."""
    values = os.environ if environment is None else environment
    secrets = {value for name, value in values.items() if is_secret_name(name) and len(value) >= _SHORTEST}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return re.sub(r"(?<=://)[^/\s@]+@", f"{HIDDEN}@", text)
