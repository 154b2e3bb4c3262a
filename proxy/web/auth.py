"""Who is asking: owners are known by a keyed hash of their credential, which is never kept."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ANONYMOUS = "anonymous"

# Headers that hold a credential, in the order in which they are looked for.
_CREDENTIALS = ("authorization", "x-api-key", "api-key", "x-forwarded-access-token")
_SECRET_WORDS = ("token", "key", "secret", "password")
_NEVER_SECRET = frozenset({"prompt_cache_key", "idempotency-key"})
# Shorter values are no secrets, and masking them would tear texts apart.
_MIN_SECRET = 6


def owner_of(headers: Mapping[str, str], key: bytes) -> str:
    """The owner that a request's credential stands for."""
    for name in _CREDENTIALS:
        value = headers.get(name)
        if value:
            return hmac.new(key, value.strip().encode(), hashlib.sha256).hexdigest()[:32]
    return ANONYMOUS


def owner_key(secret: str | None, log: str) -> bytes:
    """The key of the owners' hash: the setting ``secret``, or one made once and kept beside the log."""
    if secret is not None:
        return secret.encode()
    if not log.startswith("sqlite:"):
        return secrets.token_bytes(32)
    path = Path(f"{log.removeprefix('sqlite:')}-key")
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
    except FileExistsError:
        pass
    return path.read_bytes()


def is_secret(name: str) -> bool:
    """Whether a header or member of this name holds a secret."""
    name = name.lower()
    if name in _NEVER_SECRET or name.endswith("_tokens"):
        return False
    return name in ("authorization", "cookie") or any(word in name for word in _SECRET_WORDS)


def secret_values(headers: Iterable[tuple[bytes, bytes]]) -> Sequence[str]:
    """Values to mask in every text that legato writes itself, the longest first."""
    values: set[str] = set()
    for name, value in headers:
        if is_secret(name.decode("latin-1")):
            text = value.decode("latin-1")
            values.update((text, text.partition(" ")[2]))
    return sorted((value for value in values if len(value) >= _MIN_SECRET), key=len, reverse=True)
