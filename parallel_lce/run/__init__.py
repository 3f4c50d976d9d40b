"""Runs a call: its schedule, its losses and statistics, and the Functions for autograd and torch.compile."""
