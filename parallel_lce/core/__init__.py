"""The lowest room, which all others import: options and plan of a call, the algebra of partials, memory, gradient
buffers, and the collectives."""
