"""How a process of the cluster fails its launcher."""


class ProcessFailedError(Exception):
    """A process ended before it was ever ready; the message holds its last words."""
