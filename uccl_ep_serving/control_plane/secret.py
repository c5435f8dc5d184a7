"""The job's secret: what every connection proves, made from rank 0's random bytes and, where it is given, a key.

Without a key whoever reads the ranks' introduction (the process group's traffic, or its store until all have read)
knows the secret. With one (``UCCL_EP_SECRET_FILE``, or ``UCCL_EP_SECRET`` itself; the same on every rank) those bytes
are a salt and nothing more.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import io
import logging
import os
import select
import stat

from ..config import KEY_VARIABLE
from ..errors import ConfigError

__all__ = ["SALT_BYTES", "fingerprint", "job_secret", "key_of_environment", "read_key"]

_log = logging.getLogger("uccl_ep_serving")

SALT_BYTES = 32
#: Fewer could be guessed from a fingerprint; more are no key.
_LEAST, _MOST = 16, 1 << 16
_FILE_VARIABLE = "UCCL_EP_SECRET_FILE"
#: For which whoever writes to a pipe that is named as the file, as a shell's <(...), may write nothing.
_PIPE_SECONDS = 30.0


#: What ``UCCL_EP_SECRET`` held when it was taken out of the environment; None while it was never there.
_taken: bytes | None = None


def key_of_environment() -> bytes | None:
    """The key in ``UCCL_EP_SECRET``, which stays there, for processes that are started later; None without one."""
    return os.fsencode(os.environ[KEY_VARIABLE]).strip() if KEY_VARIABLE in os.environ else _taken


def _take_from_environment() -> bytes | None:
    """The key in ``UCCL_EP_SECRET``, None where it is not set. From the first call on it stands in the environment no
    more: not for processes that are started later, and not in ``/proc/self/environ``."""
    global _taken
    if KEY_VARIABLE in os.environ:
        held = os.fsencode(os.environ[KEY_VARIABLE])
        _taken = held.strip()
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        if place := libc.getenv(KEY_VARIABLE.encode()):
            # where the system put it at the start of the process, which is what /proc shows
            ctypes.memset(place, ord("-"), len(held))
        del os.environ[KEY_VARIABLE]
    return _taken


def read_key(path: str) -> bytes:
    """The key that this rank was given: the content of ``path`` without white space at its ends, or what
    ``UCCL_EP_SECRET`` holds; b"" for neither.

    Raises:
        ConfigError: both are given, or it is no key.
    """
    key = _take_from_environment()
    if key is not None and path:
        raise ConfigError(f"{KEY_VARIABLE} and UCCL_EP_SECRET_FILE are both set. Next step: unset one of them")
    if key is not None and not _LEAST <= len(key) <= _MOST:
        # an empty one as well: who sets it wants a key, and would have none
        raise ConfigError(f"{KEY_VARIABLE} holds {len(key)} bytes: {_LEAST} to {_MOST} are a key")
    if not path and os.environ.get(_FILE_VARIABLE) == "":
        raise ConfigError(f"{_FILE_VARIABLE} is set, and empty. Next step: name the file, or unset it")
    return _read_file(path) if key is None else key


def _content(opened: io.FileIO) -> bytes:
    """All that it holds, at most a byte more than a key may have. Raises TimeoutError, OSError."""
    content, poll = b"", select.poll()
    poll.register(opened, select.POLLIN)
    while len(content) <= _MOST:
        if not poll.poll(1000 * _PIPE_SECONDS):
            raise TimeoutError
        part = opened.read(_MOST + 1 - len(content))
        if part == b"":
            break
        content += part or b""  # None: somebody else has read it
    return content


def _read_file(path: str) -> bytes:
    if not path:
        return b""
    name = _FILE_VARIABLE
    try:
        # a pipe that nobody writes to would be waited for without end, once it is opened the usual way
        with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            content = _content(opened)
    except TimeoutError:
        raise ConfigError(
            f"{name}={path} is a pipe, and nobody has written to it, or ended it, for {_PIPE_SECONDS:g} s"
        ) from None
    except OSError as error:
        raise ConfigError(f"{name}={path} cannot be read: {error.strerror or error}") from None
    key = content.strip()
    if not _LEAST <= len(key) <= len(content) <= _MOST:
        raise ConfigError(
            f"{name}={path} holds {len(key)} bytes: {_LEAST} to {_MOST} are a key. Next step: openssl rand -hex 32 > "
            "FILE"
        )
    if stat.S_ISREG(mode) and mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ConfigError(f"{name}={path} can be read or written by other users. Next step: chmod 600 {path}")
    if stat.S_ISREG(mode) and mode & stat.S_IRGRP:
        _log.warning("%s=%s can be read by its group. Next step: chmod 600", name, path)
    return key


def job_secret(key: bytes, salt: bytes) -> bytes:
    """What the ranks of one job prove: 32 bytes, others for each ``salt``."""
    return hmac.new(key, b"uccl_ep job secret" + salt, hashlib.sha256).digest() if key else salt


def fingerprint(key: bytes) -> str:
    """Equal for equal keys, "" for none: ranks compare it before they prove anything."""
    return hmac.new(key, b"uccl_ep fingerprint", hashlib.sha256).hexdigest()[:16] if key else ""
