"""Certificates of the gateways of a run, valid or expired."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.chaos.machine import Machine, build_library
from tests.gateway.certificates import Certificate, make_certificate

EXPIRED_CLOCK_S = -10 * 24 * 3600
"""A clock by which `openssl` signs a certificate that has expired by now, since it is valid for
two days."""


class Authority:
    """A certificate authority that the clients trust."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._root = make_certificate(folder, "authority")
        self._past = Machine(build_library(folder), folder / "past.machine")
        self._past.set_clock(EXPIRED_CLOCK_S)

    @property
    def client_context(self) -> ssl.SSLContext:
        """The context of the clients."""
        return self._root.trusting_context()

    def sign(self, path: Path, *, expired: bool = False) -> Certificate:
        """Write a new certificate and key for 127.0.0.1, and return their files.

        Args:
            path: path of the files, without a suffix.
        """
        made = Certificate(path.with_suffix(".pem"), path.with_suffix(".key"))
        draft = self._folder / "draft.pem", self._folder / "draft.key"
        request, names = self._folder / "request.csr", self._folder / "names"
        names.write_text("subjectAltName=IP:127.0.0.1\n")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={path.name}", "-keyout", draft[1], "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-days", "2", "-extfile", names, "-out", draft[0]),
            *("-CA", self._root.cert, "-CAkey", self._root.key, "-CAcreateserial"),
            environment=self._past.environment if expired else {},
        )
        for file, target in zip(draft, (made.cert, made.key), strict=True):
            file.replace(target)
        return made


def _openssl(*arguments: str | Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    environment = {**os.environ, **environment}
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, env=environment)
