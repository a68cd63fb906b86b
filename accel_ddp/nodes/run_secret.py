"""The secret of a run, and the keys by which its nodes recognize each other.

With a secret (ACCEL_DDP_TOKEN or ACCEL_DDP_TOKEN_FILE, the same on every node), keys follow from it. Without one, each node makes a
key pair, the nodes exchange the public keys when the run starts, and keep to them. SECURITY.md states what both exclude.
"""

import hashlib
import hmac
import os
import stat

from accel_ddp.errors import UserError

TOKEN, TOKEN_FILE = "ACCEL_DDP_TOKEN", "ACCEL_DDP_TOKEN_FILE"


def read_secret() -> str:
    path = os.path.expanduser(os.environ.get(TOKEN_FILE, ""))
    if os.environ.get(TOKEN) or not path:
        return os.environ.get(TOKEN, "").strip()
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read(10_000).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{TOKEN_FILE} {path}: cannot be read: {getattr(error, 'strerror', None) or 'not a text'}.") from None
    if mode & 0o077:
        raise UserError(f"{TOKEN_FILE} {path}: other users may read or change it (mode {mode:04o}). Run: chmod 600 {path}")
    if not secret:
        raise UserError(f"{TOKEN_FILE} {path}: is empty. Run: openssl rand -hex 32 > {path}")
    return secret


class NodeKeys:
    """What this node has to compute the key that it shares with another node. `public` is sent to the others; "" with a secret."""

    def __init__(self, secret: str):
        self.secret, self.public = secret.encode(), ""
        if not secret:
            from cryptography.hazmat.primitives.asymmetric import x25519  # takes 0.1 s, and one node alone does not need it

            self._private, self._public_key = x25519.X25519PrivateKey.generate(), x25519.X25519PublicKey
            self.public = self._private.public_key().public_bytes_raw().hex()

    def shared_with(self, public: str, purpose: str, nodes: tuple[int, int]) -> bytes:
        """Return the key of this node and the one with a public key. `nodes` are both numbers. Raises ValueError if it is none."""
        shared = self.secret or self._private.exchange(self._public_key.from_public_bytes(bytes.fromhex(public)))
        context = f"accel-ddp {purpose} {sorted(nodes)} {sorted([self.public, public])}"
        return hmac.digest(hashlib.sha256(shared).digest(), context.encode(), "sha256")
