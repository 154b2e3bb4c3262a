"""Who is asking: owners are known by a keyed hash of their credential, which is never kept."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path

from starlette.types import Scope

from proxy.errors import OwnerRequired

ANONYMOUS = "anonymous"

# Headers that hold a credential, in the order in which they are looked for.
_CREDENTIALS = ("authorization", "x-api-key", "api-key", "x-forwarded-access-token")
_SECRET_WORDS = ("token", "key", "secret", "password")
_NEVER_SECRET = frozenset({"prompt_cache_key", "idempotency-key"})
# Shorter values are no secrets, and masking them would tear texts apart.
_MIN_SECRET = 6


class Owners:
    """Tells who is asking.

    ``owner_header`` names the user where somebody in front has checked who that is. It is believed only from
    the ``trusted`` networks: anybody else could write any name into it.
    """

    def __init__(self, key: bytes, owner_header: str | None = None, trusted: Iterable[str] = ()) -> None:
        self._key = key
        self._header = owner_header.lower() if owner_header else None
        self._trusted = [ip_network(network) for network in trusted]

    def of(self, client: str | None, headers: Mapping[str, str]) -> str:
        """The owner that a request stands for; ``client`` is the address that the connection comes from.

        ``OwnerRequired`` where a trusted proxy has named nobody.
        """
        if self._header is not None and self._trusts(client):
            name = headers.get(self._header, "").strip()
            if not name:
                raise OwnerRequired(f"The proxy in front has sent no {self._header}; owner_header names it.")
            return self._hash(f"{self._header}: {name}")
        for header in _CREDENTIALS:
            value = headers.get(header)
            if value:
                return self._hash(value.strip())
        return ANONYMOUS

    def _trusts(self, client: str | None) -> bool:
        try:
            address = ip_address(client or "")
        except ValueError:
            return False
        return any(address in network for network in self._trusted)

    def _hash(self, what: str) -> str:
        return hmac.new(self._key, what.encode(), hashlib.sha256).hexdigest()[:32]


def client_of(scope: Scope) -> str | None:
    """The address at the other end of the connection."""
    client = scope.get("client")
    return client[0] if client else None


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
