"""Access to the Hugging Face Hub, and the offline mode without it."""

import functools
import os
import socket
import sys
from urllib.parse import urlsplit

from accel_ddp.ranks.process import process


@functools.cache
def prepare_hub() -> str:
    """Return why the Hub cannot be reached, or "". Without a network, the Hub's libraries are switched to offline mode.

    They would otherwise retry for a minute, once per file. Offline they use the local cache of the Hub only.
    """
    import datasets
    import huggingface_hub
    import transformers

    if not (process.is_main and sys.stderr.isatty()):  # progress bars of every rank would fill the terminal or the log
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    constants = huggingface_hub.constants
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return ""  # behind a proxy a direct connection proves nothing
    url = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=5).close()
        return ""
    except OSError as error:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        return f"{url.hostname}: {error.strerror or error}"
