"""Has the libraries that load models say what they say through our own logs, without what is known to mean nothing."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping

HARMLESS: Mapping[str, str] = {
    # Of M-RoPE, which the model's own code reads.
    "transformers.modeling_rope_utils": "Unrecognized keys in `rope_parameters`",
    # Pillow does the same.
    "transformers.utils.import_utils": "requires torchvision",
    "diffusers.guiders.guider_utils": "experimental feature",
}
"""What messages hold that say nothing to whoever runs a stage, by the logger that gives them out."""


class _Meant(logging.Filter):
    """Lets all pass that does not hold a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self._text not in record.getMessage()


def take_over(*names: str) -> None:
    """Takes handlers and progress bars from "transformers" or "diffusers", so that their warnings, and Python's own,
    go where all of this process's logs go. May be called again."""
    logging.captureWarnings(True)
    for name in names:
        own = importlib.import_module(f"{name}.utils.logging")
        own.disable_default_handler()
        own.enable_propagation()
        own.disable_progress_bar()
    for name, text in HARMLESS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, _Meant) for each in logger.filters):
            logger.addFilter(_Meant(text))
