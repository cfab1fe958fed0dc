"""Certificates for tests, made with the `openssl` command."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its key, as PEM files."""

    cert: Path
    key: Path

    def client_context(self, trusted: Certificate) -> ssl.SSLContext:
        """Return the context of a client that shows this certificate and trusts another."""
        context = trusted.trusting_context()
        context.load_cert_chain(self.cert, self.key)
        return context

    def trusting_context(self) -> ssl.SSLContext:
        """Return the context of a client that trusts only this certificate."""
        return ssl.create_default_context(cafile=self.cert)

    def replace_by(self, other: Certificate) -> None:
        """Put the contents of another certificate into these files."""
        self.cert.write_bytes(other.cert.read_bytes())
        self.key.write_bytes(other.key.read_bytes())


def make_certificate(folder: Path, name: str) -> Certificate:
    """Create a certificate for `localhost` and 127.0.0.1 with a common name."""
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-days", "2", "-subj", f"/CN={name}",
            "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout", str(made.key), "-out", str(made.cert),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return made
