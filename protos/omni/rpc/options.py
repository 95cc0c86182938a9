"""Settings that both ends of a connection must agree on."""

import json

MIB = 1024 * 1024

MAX_MESSAGE_BYTES = 65 * MIB
"""Largest message either way: the largest media part (64 MiB) and room for what is around it."""

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
"""Largest request of a client, which travels on inside larger messages."""

KEEPALIVE_S = 20.0
"""A client asks whether the server is there after this much silence, streams or none."""

KEEPALIVE_TIMEOUT_S = 10.0
"""Either end gives the connection up when an answer takes longer."""

MIN_PING_INTERVAL_S = 10.0
"""Pings closer together than this earn a GOAWAY; well below `KEEPALIVE_S`, so that ours never do."""

IDEMPOTENT = (
    ("omni.v1.OmniService", "Cancel"),
    ("omni.v1.OmniService", "ListModels"),
    ("omni.v1.OmniService", "GetModel"),
    ("omni.v1.ClusterService", "ListReplicas"),
    ("omni.v1.StageService", "Describe"),
    ("grpc.health.v1.Health", "Check"),
)
"""Methods that gRPC itself calls again when the server cannot be reached."""

Options = list[tuple[str, str | int]]


def _common() -> Options:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),  # or a minute, whatever keepalive says
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options() -> Options:
    """Options of a server; SO_REUSEPORT is off, so a port that is taken is an error and not a shared port."""
    return [
        *_common(),
        ("grpc.http2.min_ping_interval_without_data_ms", round(MIN_PING_INTERVAL_S * 1000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", round(MIN_PING_INTERVAL_S * 1000)),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_channelz", 1),
    ]


def channel_options() -> Options:
    """Options of a channel: as the server's, with retries of the idempotent calls."""
    return [
        *_common(),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 5000),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", service_config()),
    ]


def service_config() -> str:
    """Service config of gRPC, JSON: retries on UNAVAILABLE, throttled when most of them fail."""
    return json.dumps(
        {
            "methodConfig": [
                {
                    "name": [{"service": service, "method": method} for service, method in IDEMPOTENT],
                    "retryPolicy": {
                        "maxAttempts": 4,
                        "initialBackoff": "0.1s",
                        "maxBackoff": "1s",
                        "backoffMultiplier": 2,
                        "retryableStatusCodes": ["UNAVAILABLE"],
                    },
                }
            ],
            "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
        }
    )
