"""Backends: the work on one block of tokens against one vocabulary shard, without collectives."""
