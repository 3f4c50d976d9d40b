"""Imported by every other folder: options, plan, algebra of partials, gradient buffers, collectives, memory helpers."""
