"""What every other room stands on: options and plan of a call, the algebra of partials, memory, gradient buffers, and
the collectives."""
