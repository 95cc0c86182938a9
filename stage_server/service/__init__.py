"""StageService: a session for each stream, and thin servicers over it."""
