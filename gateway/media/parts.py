"""Content parts of a chat request -> omni.v1.Media, under the model's limits."""

from dataclasses import dataclass

from gateway.errors import bad_request
from gateway.media.encoding import decode_base64, is_data_url, split_data_url
from gateway.media.fetch import Fetcher
from gateway.media.sniff import Sniffed, sniff
from gateway.schemas import AudioPart, ImagePart, Message
from omni.rpc.errors import Reason
from omni.v1 import content_pb2, generate_pb2

# The contract's own bound on a part, whatever a model says.
_MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class MediaReader:
    """Reads the media of requests to one model.

    Attributes:
        model: whose inputs and limits hold.
        fetcher: for http and https URLs; None: they are refused.
    """

    model: generate_pb2.Model
    fetcher: Fetcher | None

    def check(self, messages: list[Message]) -> None:
        """Looks at what kinds of media there are and how many, before any is touched.

        Raises:
            OmniError: UNSUPPORTED_MODALITY, MEDIA_TOO_LARGE for too many parts.
        """
        count = 0
        for index, message in enumerate(messages):
            if isinstance(message.content, str) or message.content is None:
                continue
            for place, part in enumerate(message.content):
                if not isinstance(part, ImagePart | AudioPart):
                    continue
                param = f"messages[{index}].content[{place}]"
                image = isinstance(part, ImagePart)
                needed = content_pb2.MODALITY_IMAGE if image else content_pb2.MODALITY_AUDIO
                if needed not in self.model.inputs:
                    kind = "pictures" if image else "sound"
                    raise bad_request(param, f"model {self.model.model!r} takes no {kind}", Reason.UNSUPPORTED_MODALITY)
                count += 1
                if count > self.model.limits.parts:
                    raise bad_request(
                        param,
                        f"this model takes at most {self.model.limits.parts} media parts a request",
                        Reason.MEDIA_TOO_LARGE,
                    )

    async def image(self, part: ImagePart, param: str) -> content_pb2.Media:
        """A picture, its pixels counted but not decoded.

        Raises:
            OmniError: MEDIA_INVALID, MEDIA_TOO_LARGE.
        """
        url, where = part.image_url.url, f"{param}.image_url.url"
        if is_data_url(url):
            data = await decode_base64(split_data_url(url, where).base64, where, self._bytes())
        elif self.fetcher is None:
            raise bad_request(
                where,
                "must be a data URL (data:image/png;base64,...): this gateway fetches no URLs",
                Reason.MEDIA_INVALID,
            )
        else:
            data = (await self.fetcher.fetch(url, where, self._bytes())).data
        found = sniff(data)
        if found is None or not found.mime_type.startswith("image/"):
            raise bad_request(where, "is no picture of a known kind (PNG, JPEG, WebP, GIF, BMP)", Reason.MEDIA_INVALID)
        pixels = found.width * found.height
        if pixels == 0:
            raise bad_request(where, "is a picture without pixels", Reason.MEDIA_INVALID)
        if pixels > self.model.limits.pixels:
            size = f"{found.width}x{found.height} = {pixels} pixels"
            text = f"has {size}; this model takes at most {self.model.limits.pixels}"
            raise bad_request(where, text, Reason.MEDIA_TOO_LARGE)
        return content_pb2.Media(modality=content_pb2.MODALITY_IMAGE, mime_type=found.mime_type, data=data)

    async def audio(self, part: AudioPart, param: str) -> content_pb2.Media:
        """A recording; its length is checked here when its header gives it, and by the stage in any case.

        Raises:
            OmniError: MEDIA_INVALID, MEDIA_TOO_LARGE.
        """
        where = f"{param}.input_audio.data"
        text = part.input_audio.data
        if is_data_url(text):
            text = split_data_url(text, where).base64
        data = await decode_base64(text, where, self._bytes())
        found = sniff(data)
        if found is None or not found.mime_type.startswith("audio/"):
            raise bad_request(
                where, "is no recording of a known kind (WAV, MP3, FLAC, Ogg, MP4, WebM)", Reason.MEDIA_INVALID
            )
        self._check_seconds(found, where)
        return content_pb2.Media(modality=content_pb2.MODALITY_AUDIO, mime_type=found.mime_type, data=data)

    def _check_seconds(self, found: Sniffed, where: str) -> None:
        if found.seconds > self.model.limits.seconds:
            raise bad_request(
                where,
                f"lasts {found.seconds:.1f} s; this model takes at most {self.model.limits.seconds:g} s",
                Reason.MEDIA_TOO_LARGE,
            )

    def _bytes(self) -> int:
        return min(self.model.limits.bytes, _MAX_BYTES)
