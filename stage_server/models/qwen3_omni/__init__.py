"""Qwen3-Omni: thinker, talker and code2wav, from a checkpoint in transformers' standard layout."""
