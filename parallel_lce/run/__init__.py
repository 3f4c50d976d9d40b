"""The steps of a call: its schedule, its losses and statistics, and their use by autograd and torch.compile."""
