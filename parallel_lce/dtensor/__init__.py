"""DTensors as the plain tensors of a call, and the loss as a style of ``parallelize_module``."""
