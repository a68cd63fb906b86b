"""Run a script as on a machine without network and without a Hub token: `without_hub.py SCRIPT ...`.

huggingface_hub reads its variables when it is imported, so a fork of tests/forking.py could not set them.
"""

import runpy
import sys
from pathlib import Path

from huggingface_hub import constants

if __name__ == "__main__":
    constants.ENDPOINT = "http://127.0.0.1:9"  # nothing listens there
    constants.HF_TOKEN_PATH = "/nowhere/token"
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
