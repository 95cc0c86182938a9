"""TLS and mutual TLS by files that are read again when they change, so certificates rotate without a restart."""

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files of a server, PEM.

    Attributes:
        cert: certificate chain, own first.
        key: private key of the certificate.
        client_ca: when given, clients must show a certificate that it signed.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files, PEM, with which a process serves and calls, both sides showing a certificate.

    Attributes:
        ca: certificates that peers' certificates are checked against.
        cert: certificate chain of this process, own first.
        key: private key of the certificate.
    """

    ca: Path
    cert: Path
    key: Path

    def server(self) -> ServerTls:
        """To serve with."""
        return ServerTls(self.cert, self.key, self.ca)

    def client(self) -> "ClientTls":
        """To call with."""
        return ClientTls(self.ca, self.cert, self.key)

    def arguments(self) -> tuple[str, ...]:
        """As our commands take them."""
        return ("--tls-ca", str(self.ca), "--tls-cert", str(self.cert), "--tls-key", str(self.key))


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files of a client, PEM.

    Attributes:
        ca: certificates that servers' certificates are checked against.
        cert: certificate chain to show, own first; with `key`, or both None.
        key: private key of `cert`.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a client certificate needs both its cert and its key")


def stamp(tls: ServerTls | ClientTls) -> Stamp:
    """What changes whenever one of the files is written or replaced.

    Raises:
        OSError: when one of them is not there.
    """
    files = (tls.cert, tls.key, tls.client_ca) if isinstance(tls, ServerTls) else (tls.ca, tls.cert, tls.key)
    stats = [Path(file).stat() for file in files if file is not None]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials whose files are looked at for each new connection.

    While the files cannot be read or do not fit together (a rotation that is half done), the last good ones serve.

    Raises:
        OSError: when a file cannot be read now, is no PEM, or certificate and key do not belong together.
    """
    lock = threading.Lock()
    last = stamp(tls)

    def fetch() -> Any:
        # gRPC calls this on its own threads, once a handshake; None keeps what it has.
        nonlocal last
        with lock:
            try:
                now = stamp(tls)
                if now == last:
                    return None
                configuration = _server_configuration(tls)
            except OSError:
                return None
            last = now
            return configuration

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(tls), fetch, require_client_authentication=tls.client_ca is not None
    )


def _server_configuration(tls: ServerTls) -> Any:
    _check(tls.cert, tls.key, tls.client_ca)
    return grpc.ssl_server_certificate_configuration(
        [(Path(tls.key).read_bytes(), Path(tls.cert).read_bytes())],
        root_certificates=Path(tls.client_ca).read_bytes() if tls.client_ca else None,
    )


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Credentials from the files as they are now.

    Raises:
        OSError: when a file cannot be read, is no PEM, or certificate and key do not belong together.
    """
    _check(tls.cert, tls.key, tls.ca)
    return grpc.ssl_channel_credentials(
        root_certificates=Path(tls.ca).read_bytes(),
        private_key=Path(tls.key).read_bytes() if tls.key else None,
        certificate_chain=Path(tls.cert).read_bytes() if tls.cert else None,
    )


def _check(cert: Path | None, key: Path | None, ca: Path | None) -> None:
    """Lets OpenSSL read the files: gRPC itself finds out at the first handshake, and then only in its own log.

    Raises:
        OSError: that names the files.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if cert and key:
            context.load_cert_chain(cert, key)
        if ca:
            context.load_verify_locations(ca)
    except OSError as error:
        raise OSError(f"TLS files {', '.join(str(file) for file in (cert, key, ca) if file)}: {error}") from error
