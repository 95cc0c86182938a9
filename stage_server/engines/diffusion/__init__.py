"""The diffusion engine: denoising one step at a time, many requests in turn."""
