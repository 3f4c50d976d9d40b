"""From a user's arguments to a call: checked, planned, and in debug mode compared between ranks."""
