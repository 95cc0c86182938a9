"""Chunked decoding without a loop of its own: vocoders."""
