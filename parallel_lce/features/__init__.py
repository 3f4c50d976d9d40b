"""Features of a call: what they add to its forward, its results and its gradients."""
