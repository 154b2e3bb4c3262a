"""Certificates for tests, made by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def self_signed(folder: Path, *, days: int = 2) -> Path:
    """A certificate for localhost that signs itself, with its key in the same file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    made, key = folder / "localhost.pem", folder / "key"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", str(days)]
    command += ["-subj", "/CN=localhost/O=Tests", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    made.write_text(made.read_text() + key.read_text())
    return made


def server_tls(certificate: Path) -> ssl.SSLContext:
    """For an upstream that speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context
