"""TLS of a listener, with certificates that are loaded again when they change.

Connections that exist keep their certificate. A new certificate applies to new connections.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from draftgate.gateway.config import ServeConfig
from draftgate.gateway.reloading import WatchedFiles


@dataclass(frozen=True, slots=True)
class Listener:
    """The TLS of a listener.

    Attributes:
        context: the context of all connections.
        files: the files of the certificates.
    """

    context: ssl.SSLContext
    files: WatchedFiles[None]
    _config: ServeConfig

    def apply(self, _checked: None) -> None:
        """Use the present files, which a read has checked.

        Raises:
            OSError: the files have changed again and do not match.
        """
        _load(self.context, self._config)


def tls_listener(config: ServeConfig) -> Listener | None:
    """Return the TLS of a node, or None without a certificate.

    Raises:
        ValueError: a file is missing, cannot be read or does not match, or a setting is missing.
    """
    given = (config.tls_certfile, config.tls_keyfile, config.tls_client_ca_file)
    if config.tls_certfile is None:
        if any(given):
            raise ValueError("--tls-keyfile and --tls-client-ca-file need --tls-certfile")
        return None
    paths = [Path(path) for path in given if path is not None]
    files = WatchedFiles("the TLS certificates", paths, lambda: _load(_context(), config))
    context = _context()
    try:
        _load(context, config)
    except OSError as error:
        raise ValueError(f"cannot use the TLS certificates: {_reason(error, paths)}") from None
    return Listener(context, files, config)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(context: ssl.SSLContext, config: ServeConfig) -> None:
    """Load the files into a context.

    A failed load may leave a context with a certificate that does not match its key, so callers
    first try a new context.

    Raises:
        OSError: a file is missing or cannot be used.
    """
    assert config.tls_certfile is not None
    # Without a password, OpenSSL would ask for one on the terminal.
    context.load_cert_chain(config.tls_certfile, config.tls_keyfile, password=lambda: b"")
    if config.tls_client_ca_file is not None:
        context.load_verify_locations(config.tls_client_ca_file)
        # Probes and other nodes have no certificate, so the application requires certificates.
        context.verify_mode = ssl.CERT_OPTIONAL


def _reason(error: OSError, paths: list[Path]) -> str:
    """Return what is wrong, with the names of the files, which OpenSSL omits."""
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        return f"{missing} does not exist"
    return f"{', '.join(map(str, paths))}: {getattr(error, 'reason', None) or error.strerror}"
