"""Helpers for tests over real sockets: a scripted upstream, and a server for an ASGI app."""
