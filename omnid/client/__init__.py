"""Python clients: `AsyncOmni` speaks to a coordinator, `Omni` starts a private cluster and waits for the answers."""

from omnid.client.asynchronous import AsyncOmni
from omnid.client.blocking import Omni
from omnid.client.types import Artifact, Generation, Output

__all__ = ["Artifact", "AsyncOmni", "Generation", "Omni", "Output"]
