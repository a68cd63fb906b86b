"""The removal of secrets from what is written to logs, configs, checkpoints, trackers and reports."""

import contextlib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = "***"
_WORDS = "TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API[_-]?KEY|ACCESS[_-]?KEY([_-]ID)?|PRIVATE[_-]?KEY|AUTH"
# The word ends the name, so TOKENIZERS_PARALLELISM, max_new_tokens and AWS_WEB_IDENTITY_TOKEN_FILE are not secrets.
_SECRET_NAME = re.compile(rf"(^|[_\-.])({_WORDS})$", re.IGNORECASE)
_NO_SECRET_NAME = re.compile(r"(^|[_-])(pad|eos|bos|sep|cls|mask|unk|image|stop)[_-]token$", re.IGNORECASE)
_SHORTEST = 6  # characters; shorter values, such as "1" or "true", occur everywhere
_IN_URL = re.compile(r"(?<=://)[^/\s@'\"]+@")
_IN_QUERY = re.compile(
    r"([?&](?:[\w\-]*(?:token|secret|password|api_?key|signature|credential)|key|sig|auth)=)[^&#\s'\"]+", re.IGNORECASE
)
_IN_HEADER = re.compile(r"(\b(?:Bearer|Basic)\s+)[\w\-.~+/=]{8,}")
# Keys whose format identifies them: Hugging Face, GitHub, GitLab, OpenAI, AWS, wandb, Slack.
_KEYS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}|sk-[\w\-]{20,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|wandb_v\d+_\w{16,}|xox[abprs]-[\w\-]{10,})"
)
_IN_FILE = re.compile(
    r"(?:\bpassword\s+|\b(?:aws_secret_access_key|aws_session_token|aws_access_key_id|api_key)\s*=\s*)(\S+)", re.IGNORECASE
)


@functools.lru_cache(maxsize=10_000)
def is_secret_name(name: str) -> bool:
    """Return whether a variable or an option of this name probably holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET_NAME.search(name)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return `text` without secrets.

    Secrets are the values of environment variables with such names, the passwords and keys in ~/.netrc, in the credentials of AWS
    and in the token of the Hub, user names and passwords in URLs, and keys whose format identifies them.
    """
    if len(text) < _SHORTEST:  # such as the end of a line, which `print` writes on its own
        return text
    for secret in _known_secrets(os.environ if environment is None else environment):
        if secret in text:
            text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _IN_QUERY.sub(rf"\g<1>{HIDDEN}", _IN_URL.sub(f"{HIDDEN}@", text))
    return _KEYS.sub(HIDDEN, _IN_HEADER.sub(rf"\g<1>{HIDDEN}", text))


def redact_values(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Return a value as JSON stores it, without secrets. The text of an entry with the name of a secret is hidden completely."""
    if isinstance(value, str):
        return redact(value, environment)
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if isinstance(one, str) and one and is_secret_name(str(name)) else redact_values(one, environment)
            for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_values(one, environment) for one in value]
    return value


def redact_command(words: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Return a command line without secrets, including those that follow an option such as --api_key."""
    redacted: list[str] = []
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        name, equals, value = word.partition("=")
        if equals and value and is_secret_name(name):
            redacted.append(f"{name}={HIDDEN}")
        elif before.startswith("-") and "=" not in before and is_secret_name(before) and not word.startswith("--"):
            redacted.append(HIDDEN)
        else:
            redacted.append(redact(word, environment))
    return redacted


def _known_secrets(environment: Mapping[str, str]) -> list[str]:
    """Return the secrets of this user, the longest first, because one may contain another."""
    found = {value.strip() for name, value in environment.items() if is_secret_name(name)}
    home = environment.get("HOME", "~")
    hub = environment.get("HF_HOME") or f"{home}/.cache/huggingface"
    files = (
        environment.get("NETRC") or f"{home}/.netrc",
        environment.get("AWS_SHARED_CREDENTIALS_FILE") or f"{home}/.aws/credentials",
    )
    found |= {secret for path in files for secret in _secrets_in(path)}
    found |= _content_of(environment.get("HF_TOKEN_PATH") or f"{hub}/token")
    found |= _content_of(environment.get("ACCEL_DDP_TOKEN_FILE") or os.devnull)
    return sorted((secret for secret in found if len(secret) >= _SHORTEST), key=len, reverse=True)


@functools.cache
def _secrets_in(path: str) -> frozenset[str]:
    """Return the passwords and keys in ~/.netrc or in a file of AWS."""
    return frozenset(match.strip("\"'") for text in _content_of(path) for match in _IN_FILE.findall(text))


@functools.cache
def _content_of(path: str) -> frozenset[str]:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        file = Path(path).expanduser()
        if file.is_file() and file.stat().st_size < 100_000:
            return frozenset([file.read_text().strip()])
    return frozenset()
