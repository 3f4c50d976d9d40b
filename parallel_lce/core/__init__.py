"""Values that every layer shares: options, the plan, partials, collectives."""
