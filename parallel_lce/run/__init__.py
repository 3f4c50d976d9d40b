"""What a call does: its schedule, its losses and statistics, and how autograd and torch.compile run it."""
