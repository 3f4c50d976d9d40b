"""From what a user passes to a call: checked, planned, and in debug mode agreed on by all ranks."""
