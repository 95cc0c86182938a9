"""A text model under the autoregressive engine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache

from stage_server.checkpoint import DTYPES, WEIGHTS, readable, require
from stage_server.engines.ar import attention, settings
from stage_server.engines.ar.causal import CausalDecoder, TokenState
from stage_server.engines.ar.decoder import Geometry, Slice, last_rows
from stage_server.engines.arguments import Arguments, refuse_unused
from stage_server.models.text import prompt

if TYPE_CHECKING:
    from omni.v1 import config_pb2
    from stage_server.engines.base import Run


class TextDecoder(CausalDecoder[TokenState]):
    """One causal language model."""

    def __init__(self, spec: config_pb2.StageSpec, device: torch.device, *, max_length: int) -> None:
        self._spec = spec
        self.device = device
        self._max_length = max_length

    def load(self) -> Geometry:
        spec, folder = self._spec, Path(self._spec.checkpoint)
        require(folder, "config.json", WEIGHTS, "tokenizer*")
        with readable(folder):
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=spec.trust_remote_code)
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES.get(spec.dtype, "auto"),
                trust_remote_code=spec.trust_remote_code,
                use_safetensors=True,
            )
        self._model = model.to(self.device).eval()
        config = model.config.get_text_config()
        attention.use(config)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._narrow = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.defaults = settings.sampling_defaults(model.generation_config)
        self.end_ids = settings.end_ids(model.generation_config, self.tokenizer)
        geometry = settings.geometry(config, model.dtype, self.device, self._max_length)
        self._longest = geometry.max_length
        return geometry

    def check(self, run: Run) -> None:
        prompt.check(run.prompt)
        refuse_unused(run.params, "voice", "format", "diffusion")
        Arguments(run.params.extra, "params.extra").done()

    def prepare(self, run: Run) -> TokenState:
        assert run.prompt is not None, "check() refuses a run without a prompt"
        ids = prompt.tokenize(run.prompt, self.tokenizer, self._vocabulary, self._longest)
        return self.begin(TokenState(run, self.sampling(run), prompt_ids=ids))

    def forward(self, step: Sequence[Slice[TokenState]], cache: Cache) -> torch.Tensor:
        """The rows are logits [S, V] already: what lies between hidden states and logits is the model's own."""
        ids, positions = self.inputs(step)
        rows = torch.tensor(last_rows(step), device=self.device)
        keep = {"logits_to_keep": rows} if self._narrow else {}
        output = self._model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **keep)
        logits: torch.Tensor = output.logits[0]
        return logits if self._narrow else logits[rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def unload(self) -> None:
        del self._model
