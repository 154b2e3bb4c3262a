"""Who owns a task: a credential's bearer, or the user whom a trusted proxy names."""

from __future__ import annotations

import json

import pytest
from support.frames import completed, created, message, sse
from support.legato import proxied, request

from proxy.errors import OwnerRequired
from proxy.web.auth import ANONYMOUS, Owners

pytestmark = pytest.mark.anyio

KEY = b"k" * 32


@pytest.fixture
def anyio_backend() -> str:
    """The server runs on asyncio."""
    return "asyncio"


def test_a_credential_is_an_owner() -> None:
    """Its hash under a key of our own: another credential or another key is somebody else."""
    one = Owners(KEY).of("1.2.3.4", {"authorization": "Bearer a"})
    assert one == Owners(KEY).of(None, {"authorization": "Bearer a"})
    assert one != Owners(KEY).of(None, {"authorization": "Bearer b"})
    assert one != Owners(b"x" * 32).of(None, {"authorization": "Bearer a"})
    assert Owners(KEY).of(None, {}) == ANONYMOUS
    assert "Bearer" not in one


def test_a_trusted_proxy_names_the_owner() -> None:
    """The credential may change, the user stays; and nobody else's word counts."""
    owners = Owners(KEY, "X-Forwarded-User", ["10.0.0.0/8", "::1"])
    named = {"x-forwarded-user": "ann", "authorization": "Bearer a"}
    ann = owners.of("10.1.2.3", named)
    assert ann == owners.of("::1", {**named, "authorization": "Bearer b"})
    assert ann != owners.of("10.1.2.3", {"x-forwarded-user": "bob"})
    assert owners.of("11.0.0.1", named) == Owners(KEY).of(None, {"authorization": "Bearer a"})


def test_a_trusted_proxy_that_names_nobody_is_refused() -> None:
    """401 rather than one owner for all who have no name."""
    with pytest.raises(OwnerRequired):
        Owners(KEY, "X-Forwarded-User", ["127.0.0.1"]).of("127.0.0.1", {"authorization": "Bearer a"})


async def test_users_behind_a_proxy_see_their_own_tasks() -> None:
    """Starts, lists and look-ups go by the named user; upstream gets the header as it came."""
    settings = {"owner_header": "X-Forwarded-User", "trusted_proxies": ("127.0.0.1",)}
    ann, bob = ("X-Forwarded-User", "ann"), ("X-Forwarded-User", "bob")
    async with proxied(**settings) as (upstream, proxy):
        upstream.plays(sse(created(), completed(message("a"))))
        reading = await proxy.whole(headers=[ann])
        assert upstream.requests[0].one("x-forwarded-user") == b"ann"
        assert [task["id"] for task in await proxy.tasks(ann)] == [reading.task]
        assert await proxy.tasks(bob) == []
        refused = await proxy.ask(request(method="GET", path="/legato/tasks"))
        assert (refused.status, json.loads(refused.body)["error"]["code"]) == (401, "owner_required")
