"""Makes a call from a user's arguments: checks them, plans the call, and in debug mode compares them between ranks."""
