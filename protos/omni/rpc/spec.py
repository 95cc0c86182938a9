"""Identity of a stage's spec."""

import xxhash

from omni.v1 import config_pb2


def spec_hash(spec: config_pb2.StageSpec) -> str:
    """Hex xxh3-64 of the deterministic serialization: equal specs, equal hashes."""
    return xxhash.xxh3_64_hexdigest(spec.SerializeToString(deterministic=True))
