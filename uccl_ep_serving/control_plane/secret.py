"""The job's secret: what every connection proves, made from rank 0's random bytes and, where it is given, a key.

Without a key whoever reads the ranks' introduction (the process group's traffic, or its store until all have read)
knows the secret. With one (``UCCL_EP_SECRET_FILE``, the same content on every rank) those bytes are a salt and nothing
more.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from pathlib import Path

from ..errors import ConfigError

__all__ = ["SALT_BYTES", "fingerprint", "job_secret", "read_key"]

_log = logging.getLogger("uccl_ep_serving")

SALT_BYTES = 32
#: Fewer could be guessed from a fingerprint; more are no key.
_LEAST, _MOST = 16, 1 << 16


def read_key(path: str) -> bytes:
    """The content of ``path`` without white space at its ends, b"" for no path. Raises ConfigError."""
    if not path:
        return b""
    name, file = "UCCL_EP_SECRET_FILE", Path(path)
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            content = opened.read(_MOST + 1)
    except OSError as error:
        raise ConfigError(f"{name}={path} cannot be read: {error.strerror or error}") from None
    key = content.strip()
    if not _LEAST <= len(key) <= len(content) <= _MOST:
        raise ConfigError(
            f"{name}={path} holds {len(key)} bytes: {_LEAST} to {_MOST} are a key. Next step: openssl rand -hex 32 > "
            "FILE"
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and stat.S_ISREG(mode):
        _log.warning("%s=%s can be read by other users. Next step: chmod 600", name, path)
    return key


def job_secret(key: bytes, salt: bytes) -> bytes:
    """What the ranks of one job prove: 32 bytes, others for each ``salt``."""
    return hmac.new(key, b"uccl_ep job secret" + salt, hashlib.sha256).digest() if key else salt


def fingerprint(key: bytes) -> str:
    """Equal for equal keys, "" for none: ranks compare it before they prove anything."""
    return hmac.new(key, b"uccl_ep fingerprint", hashlib.sha256).hexdigest()[:16] if key else ""
