"""How a process of the cluster fails its launcher."""

BAD_OPTIONS = 2
"""Exit status by which every process of a cluster says that its options or its configuration cannot be."""


class ProcessFailedError(Exception):
    """A process ended before it was ever ready; the message holds its last words.

    Attributes:
        status: how it ended, as in `subprocess.Popen.returncode`.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
