"""TLS of a listener, with certificates that are loaded again when they change.

Connections that exist keep their certificates. New certificates and CAs apply to new connections.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from draftgate.gateway.config import ServeConfig
from draftgate.gateway.file_safety import check_writers
from draftgate.gateway.reloading import WatchedFiles


class ReplaceableContext(ssl.SSLContext):
    """A context that gives each new connection the current context.

    OpenSSL can add a CA to a context but remove none, so changed files need a new context. Sessions
    of an earlier context cannot be resumed in a new one, so clients of a removed CA cannot return.
    """

    current: ssl.SSLContext

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Begin a connection, as event loops do for each accepted socket."""
        return self.current.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


@dataclass(frozen=True, slots=True)
class Listener:
    """The TLS of a listener.

    Attributes:
        context: the context of all connections.
        files: the files of the certificates, which are read as a new context.
    """

    context: ReplaceableContext
    files: WatchedFiles[ssl.SSLContext]

    def use(self, context: ssl.SSLContext) -> None:
        """Use a context for new connections."""
        self.context.current = context


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

    def read() -> ssl.SSLContext:
        check_writers(paths, strict=config.strict)
        return _context(config)

    files = WatchedFiles("the TLS certificates", paths, read)
    listener = Listener(ReplaceableContext(ssl.PROTOCOL_TLS_SERVER), files)
    try:
        listener.use(files.read())
    except OSError as error:
        raise ValueError(f"cannot use the TLS certificates: {_reason(error, paths)}") from None
    return listener


def _context(config: ServeConfig) -> ssl.SSLContext:
    """Return a context with the present contents of the files.

    Raises:
        OSError: a file is missing or cannot be used.
    """
    assert config.tls_certfile is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # Without a password, OpenSSL would ask for one on the terminal.
    context.load_cert_chain(config.tls_certfile, config.tls_keyfile, password=lambda: b"")
    if config.tls_client_ca_file is not None:
        context.load_verify_locations(config.tls_client_ca_file)
        # Probes and other nodes have no certificate, so the application requires certificates.
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _reason(error: OSError, paths: list[Path]) -> str:
    """Return what is wrong, with the names of the files, which OpenSSL omits."""
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        return f"{missing} does not exist"
    return f"{', '.join(map(str, paths))}: {getattr(error, 'reason', None) or error.strerror}"
