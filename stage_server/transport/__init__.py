"""Tensors that travel round gRPC: the arena that holds what this replica published, and readers of others' arenas."""
