"""A deploy file: which models are served, where their stages run, and within which bounds."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from omni.rpc.address import check_address
from omni.rpc.tls import TlsFiles, channel_credentials
from omnid.config.contract import DiffusionSection, FormatName, SamplingSection
from omnid.config.document import Document, locate
from omnid.config.errors import ConfigError
from omnid.config.section import Arguments, ByteCount, Count, ModelName, Name, Seconds, Section

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda:\d+(,\d+)*)$")]
Address = Annotated[str, AfterValidator(check_address)]
"""host:port; port 0 takes a free one."""
ASSET = "asset:"
"""Before the name of a model that is shipped, in place of a checkpoint's folder."""


class BoundsSection(Section):
    """How long each kind of waiting may last, in seconds."""

    queue: Seconds | None = None
    first_output: Seconds | None = None
    gap: Seconds | None = None
    cancel: Seconds | None = None


class RequestBoundsSection(BoundsSection):
    total: Seconds | None = None
    """Of a whole request, so no stage has one of its own."""


class LimitsSection(Section):
    """What a request may bring along; 0: nothing of that kind."""

    bytes: ByteCount = 20 << 20
    """Of one encoded part."""
    pixels: Annotated[int, Field(ge=0, le=1 << 32)] = 16_777_216
    """Of one picture."""
    parts: Annotated[int, Field(ge=0, le=1024)] = 16
    seconds: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 600.0
    """Of one recording or film."""


class DefaultsSection(Section):
    """What the parameters of a request are laid over."""

    sampling: SamplingSection | None = None  # type: ignore[valid-type]
    diffusion: DiffusionSection | None = None  # type: ignore[valid-type]
    format: FormatName | None = None
    voice: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    extra: Arguments = Field(default_factory=dict)


class StageSettings(Section):
    """What may be said of all stages of a model and of one; what is said of one goes before."""

    dtype: DtypeName | None = None
    max_running: Count | None = None
    """Requests that share a step."""
    max_waiting: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    arena: Annotated[ByteCount, Field(ge=1 << 20)] | None = None
    """Room for published tensors."""
    lease: Seconds | None = None
    """How long a published tensor is kept that nobody releases."""
    checksum: bool | None = None
    """Published tensors carry one, and readers compare it."""
    stall: Seconds | None = None
    """Work and no step for this long: unhealthy."""
    bounds: BoundsSection = Field(default_factory=BoundsSection)
    env: dict[Annotated[str, Field(pattern=r"^[^=]+$")], str] = Field(default_factory=dict)


class StageSection(StageSettings):
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    devices: Annotated[list[Device], Field(min_length=1)] = Field(default_factory=lambda: ["cpu"])
    """Of each replica, in turn."""
    hosts: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\[\]-]*$")]] = Field(default_factory=list)
    """Of each replica, in turn; empty: this host."""
    engine: Arguments = Field(default_factory=dict)
    """Checked by the engine that reads them."""
    defaults: DefaultsSection = Field(default_factory=DefaultsSection)


class ModelSection(StageSettings):
    name: ModelName
    """In requests."""
    pipeline: str
    """Name of a shipped pipeline, or path of a file."""
    checkpoint: str = ""
    """Folder, or "asset:NAME"; a relative one starts at this file. Synthetic pipelines have none."""
    trust_remote_code: bool = False
    max_requests: Count = 256
    """At work at once."""
    bounds: RequestBoundsSection = Field(default_factory=RequestBoundsSection)
    max_queued: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    limits: LimitsSection = Field(default_factory=LimitsSection)
    stages: dict[Name, StageSection] = Field(default_factory=dict)


class ListenSection(Section):
    grpc: Address = "127.0.0.1:7070"
    http: Address | None = "127.0.0.1:8000"
    """Of the gateway; null: none is started."""
    metrics: Address | None = None
    """Of omnid's own metrics; null: not served."""


class TlsSection(Section):
    """Files, PEM, with which all processes of the deployment speak mutual TLS; a relative path starts at this file."""

    ca: Annotated[str, Field(min_length=1)]
    cert: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(min_length=1)]


class DeployConfig(Section):
    models: Annotated[list[ModelSection], Field(min_length=1)]
    listen: ListenSection = Field(default_factory=ListenSection)
    tls: TlsSection | None = None
    """None: plain text."""

    _document: Document | None = PrivateAttr(default=None)

    def tls_files(self) -> TlsFiles | None:
        """The files of `tls`, found from where the deployment lies, once they have been read.

        Raises:
            ConfigError: with each that is not there, or that holds what OpenSSL does not take.
        """
        if self.tls is None:
            return None
        document = self.document
        named = {"ca": self.tls.ca, "cert": self.tls.cert, "key": self.tls.key}
        files = {key: locate(document.folder, name).absolute() for key, name in named.items()}
        problems = [
            document.problem(("tls", key), f"{file} cannot be read: {why}")
            for key, file in files.items()
            if (why := _unreadable(file))
        ]
        if problems:
            raise ConfigError(problems)
        found = TlsFiles(**files)
        try:
            channel_credentials(found.client())
        except OSError as error:
            raise ConfigError([document.problem(("tls",), str(error))]) from None
        return found

    @property
    def document(self) -> Document:
        """What it was read from, for errors that are found later; an empty one when it was made in Python."""
        return self._document or Document("deploy", self.model_dump(by_alias=True, exclude_unset=True))


def _unreadable(file: Path) -> str:
    """Why a file cannot be read; "" when it can."""
    try:
        if stat.S_ISFIFO(file.stat().st_mode):
            return "Is a pipe"  # It would be waited for, and could be read only once.
        file.open("rb").close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


SETTINGS: dict[str, object] = {
    "dtype": "auto",
    "max_running": 32,
    "max_waiting": 1024,
    "arena": 64 << 20,
    "lease": 600.0,
    "checksum": False,
    "stall": 60.0,
}
"""What a stage gets that nobody said."""

BOUNDS: dict[str, float] = {"queue": 30.0, "first_output": 60.0, "gap": 30.0, "cancel": 5.0, "total": 600.0}
