"""What every speaker of the contract needs: servers, channels, errors, TLS, logs, metrics, traces."""

import os

# gRPC's own remarks on closed connections are not for people; its errors are. Read when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
