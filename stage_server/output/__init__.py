"""Finished artifacts: encoded once, on the stage that made them, in a pool off the engine's thread."""
