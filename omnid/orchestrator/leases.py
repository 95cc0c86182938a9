"""Who still reads which published tensor. A tensor goes back to its owner when its last reader is done with it, and at
the latest when its request ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Tensor(NamedTuple):
    """A published tensor as it is named in a payload."""

    name: str
    owner: str
    """Replica that holds it."""
    lease: int


class _Lease:
    __slots__ = ("owner", "readers", "request")

    def __init__(self, owner: str, request: str, readers: int) -> None:
        self.owner = owner
        self.request = request
        self.readers = readers


class Leases:
    """The ledger over all requests."""

    def __init__(self, give_back: Callable[[str, int], None]) -> None:
        """`give_back(owner, lease)` tells the owner that nobody reads the tensor any more."""
        self._leases: dict[int, _Lease] = {}
        self._of_request: dict[str, set[int]] = {}
        self._give_back = give_back

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, request: str, tensor: Tensor, readers: int) -> None:
        """A tensor was published for `readers` runs; for none it goes back at once."""
        if readers == 0:
            self._give_back(tensor.owner, tensor.lease)
            return
        self._leases[tensor.lease] = _Lease(tensor.owner, request, readers)
        self._of_request.setdefault(request, set()).add(tensor.lease)

    def done(self, lease: int) -> bool:
        """One reader is done. False: nobody had it under this number (any more)."""
        entry = self._leases.get(lease)
        if entry is None:
            return False
        entry.readers -= 1
        if entry.readers == 0:
            del self._leases[lease]
            held = self._of_request[entry.request]
            held.discard(lease)
            if not held:
                del self._of_request[entry.request]
            self._give_back(entry.owner, lease)
        return True

    def end(self, request: str) -> None:
        """The request has ended: what is left of it goes back."""
        for lease in self._of_request.pop(request, ()):
            self._give_back(self._leases.pop(lease).owner, lease)

    def forget(self, owner: str) -> None:
        """The owner is gone, and its tensors with it."""
        for lease in [lease for lease, entry in self._leases.items() if entry.owner == owner]:
            request = self._leases.pop(lease).request
            held = self._of_request[request]
            held.discard(lease)
            if not held:
                del self._of_request[request]
