"""API keys of clients: read from an environment variable or a file, kept as digests only."""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import time
from pathlib import Path
from typing import NoReturn

from configs.schema import SecurityConfig

logger = logging.getLogger(__name__)

#: A bearer token as RFC 6750 has it. A shorter one can be guessed.
MIN_KEY_LENGTH, MAX_KEY_LENGTH = 16, 512
_KEY = re.compile(r"[A-Za-z0-9._~+/\-]+=*")
#: Seconds between two looks at the key file.
FILE_CHECK_PERIOD_S = 1.0


class ApiKeysError(Exception):
    """Keys are configured and cannot be used. The message names the setting and never holds a key."""


class ApiKeys:
    """The keys that a client may show. Holds digests under a secret of this process, and cannot be pickled.

    A file is read again when it changes, at most once a second; while the new one cannot be used, the old keys
    stay valid and the reason is logged.
    """

    def __init__(self, keys: list[str], file: Path | None = None) -> None:
        """``keys`` never change; those of ``file`` may. Raises ``ApiKeysError``."""
        self._secret = secrets.token_bytes(32)
        self._file = file
        self._seen = None if file is None else _fingerprint(file)
        self._fixed = self._digests_of(keys)
        self._digests = self._fixed + self._digests_of([] if file is None else _file_keys(file))
        self._next_check = time.monotonic() + FILE_CHECK_PERIOD_S

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"<ApiKeys: {len(self)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("ApiKeys cannot be pickled: each process reads them itself")

    def accepts(self, key: bytes) -> bool:
        """Whether ``key`` is one of them; the time does not tell which, nor how much of one was right."""
        self._refresh()
        given, found = hmac.digest(self._secret, key, "sha256"), False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found

    def _digests_of(self, keys: list[str]) -> list[bytes]:
        return [hmac.digest(self._secret, key.encode("ascii"), "sha256") for key in keys]

    def _refresh(self) -> None:
        if self._file is None or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + FILE_CHECK_PERIOD_S
        seen = _fingerprint(self._file)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            keys = _file_keys(self._file)
        except ApiKeysError as error:
            logger.error("%s; the keys read before stay valid", error)
            return
        self._digests = self._fixed + self._digests_of(keys)
        logger.info("security.api_keys_file was read again: %d keys", len(keys))


def load_api_keys(config: SecurityConfig) -> ApiKeys | None:
    """The configured keys; None when none are configured and the server is open. Raises ``ApiKeysError``."""
    if config.api_keys_env is None and config.api_keys_file is None:
        return None
    keys: list[str] = []
    if config.api_keys_env is not None:
        where = f"security.api_keys_env: the environment variable {config.api_keys_env}"
        if (text := os.environ.get(config.api_keys_env)) is None:
            raise ApiKeysError(f"{where} is not set")
        keys = _parse(text, where)
    file = None if config.api_keys_file is None else Path(config.api_keys_file).expanduser()
    return ApiKeys(keys, file)


def _file_keys(file: Path) -> list[str]:
    where = f"security.api_keys_file: {file}"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ApiKeysError(
            f"{where} cannot be read: {(error.strerror or 'unknown reason').lower()}"
        ) from None
    except UnicodeDecodeError:
        raise ApiKeysError(f"{where} is not a UTF-8 text file") from None
    return _parse(text, where)


def _parse(text: str, where: str) -> list[str]:
    """Keys separated by commas or line ends; ``#`` begins a comment."""
    keys: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        for part in line.split("#")[0].split(","):
            key = part.strip()
            if key and not (MIN_KEY_LENGTH <= len(key) <= MAX_KEY_LENGTH and _KEY.fullmatch(key)):
                raise ApiKeysError(
                    f"{where}, line {number}: a key must be {MIN_KEY_LENGTH} to {MAX_KEY_LENGTH} characters of "
                    "A-Z a-z 0-9 . _ ~ + / - with = at its end only"
                )
            if key:
                keys.append(key)
    if not keys:
        raise ApiKeysError(f"{where} holds no key")
    return keys


def _fingerprint(file: Path) -> tuple[int, int, int, int] | None:
    """Differs after every change, a replaced symbolic link (Kubernetes updates a Secret so) included."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
