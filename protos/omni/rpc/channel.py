"""The one way to make a channel."""

import grpc

from omni.rpc.options import channel_options
from omni.rpc.reloading import ReloadingChannel
from omni.rpc.tls import ClientTls


def make_channel(target: str, *, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel to `target` ("host:port", or any gRPC target name) of the running event loop.

    With `tls` the files are read again when they change, see `omni.rpc.reloading`.

    Raises:
        OSError: when a TLS file cannot be read.
    """
    options = channel_options()
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    return ReloadingChannel(target, tls, options)
